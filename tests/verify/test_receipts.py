"""A receipt is believed if the key's owner signed it as it is, about the run as it is."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_signing.signing import Config

from lineage.digest import seal
from lineage.receipt import AUDIT, Audit
from tests.commands import Command
from tests.verify.conftest import make_keys
from verify.receipts import receipt_writer

Keys = tuple[Path, Path]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A sealed directory with another inside."""
    inner = tmp_path / "run" / "checkpoints" / "iter_0000002"
    inner.mkdir(parents=True)
    (inner / "model.bin").write_bytes(b"weights")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"loss": 1}\n')
    seal(inner)
    seal(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def receipt(run: Path, keys: Keys, verify: Command) -> Path:
    """A signed one of `mlm-verify run`."""
    path = run.parent / "receipt.json"
    done = verify("run", run, "--receipt", path, "--key", keys[0])
    assert done.code == 0, done.err
    return path


def test_what_was_signed_is_verified(run: Path, receipt: Path, keys: Keys, verify: Command) -> None:
    done = verify("receipt", receipt, "--key", keys[1], run)
    assert done.code == 0, done.err
    assert done.out.startswith("run of run, 20")
    statement = json.loads(receipt.read_text())
    assert {subject["name"] for subject in statement["subject"]} == {
        "COMPLETE", "checkpoints/iter_0000002/COMPLETE", "metrics.jsonl"
    }  # fmt: skip
    assert (statement["_type"], statement["predicateType"]) == ("https://in-toto.io/Statement/v1", AUDIT)
    assert statement["predicate"]["version"]


def test_one_that_says_of_a_difference_is_exit_code_3(run: Path, keys: Keys, verify: Command) -> None:
    path = run.parent / "receipt.json"
    receipt_writer(run, path, keys[0])(Audit(verb="replay", differs=["iterations 1 to 2: another loss"]))
    assert "the receipt says: iterations 1 to 2" in refused(verify("receipt", path, "--key", keys[1], run), 3)


def edited(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def change(receipt: Path) -> None:
        values = json.loads(receipt.read_text())
        edit(values)
        receipt.write_text(json.dumps(values))

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edited(lambda it: it["predicate"].update(verb="replay")), "was changed since"),
        (edited(lambda it: it.update(predicateType="https://slsa.dev/provenance/v1")), "is not a receipt"),
        (edited(lambda it: it["predicate"].update(differs="nothing")), "is not what it should be"),
        (edited(lambda it: it["subject"][0].pop("digest")), "is not a receipt"),
        (lambda receipt: receipt.with_name("receipt.json.sig").unlink(), "is not signed"),
        (lambda receipt: receipt.with_name("receipt.json.sig").write_text("{}"), "is not a receipt"),
        (lambda receipt: receipt.write_text("[]"), "no JSON object"),
    ],
)
def test_one_that_was_changed(
    change: Callable[[Path], None], said: str, run: Path, receipt: Path, keys: Keys, verify: Command
) -> None:
    change(receipt)
    assert said in refused(verify("receipt", receipt, "--key", keys[1], run), 6)


def test_another_key(run: Path, receipt: Path, keys: Keys, verify: Command, tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    receipt_writer(run, others / "receipt.json", None)(Audit(verb="run", differs=[]))
    assert "is not signed" in refused(verify("receipt", others / "receipt.json", "--key", keys[1]), 6)
    stranger, _ = make_keys(others)
    receipt_writer(run, others / "receipt.json", stranger)(Audit(verb="run", differs=[]))
    assert "was not signed with" in refused(verify("receipt", others / "receipt.json", "--key", keys[1], run), 6)


def test_another_run(run: Path, receipt: Path, keys: Keys, verify: Command) -> None:
    (run / "metrics.jsonl").write_text('{"loss": 2}\n')
    seal(run)
    assert "COMPLETE is another (run)" in refused(verify("receipt", receipt, "--key", keys[1], run), 6)
    assert "says nothing of" in refused(verify("receipt", receipt, "--key", keys[1], run.parent), 6)


@pytest.mark.parametrize("names", [(), ("COMPLETE", "../key.pub")])
def test_subjects_that_are_not_of_a_run(
    names: tuple[str, ...], run: Path, receipt: Path, keys: Keys, verify: Command
) -> None:
    """Signed, but of nothing, or of what lies beside the run."""
    statement = json.loads(receipt.read_text())
    statement["subject"] = [
        {"name": name, "digest": {"sha256": hashlib.sha256((run / name).read_bytes()).hexdigest()}} for name in names
    ]
    receipt.write_text(json.dumps(statement))
    Config().use_elliptic_key_signer(private_key=keys[0]).sign(receipt, receipt.with_name("receipt.json.sig"))
    error = refused(verify("receipt", receipt, "--key", keys[1], run), 6)
    assert ("key.pub is another" in error) if names else ("says nothing of" in error)


def test_keys_stay_out_of_runs(run: Path, keys: Keys, verify: Command) -> None:
    inside = shutil.copy(keys[0], run / "key.pem")
    assert "lies in the run" in refused(verify("run", run, "--receipt", run.parent / "r.json", "--key", inside), 2)
    assert "lies in the run" in refused(verify("run", run, "--receipt", run / "r.json"), 2)
    assert "--receipt" in refused(verify("run", run, "--key", keys[0]), 2)
    assert not (run.parent / "r.json").exists()


def test_files_that_are_no_keys(run: Path, receipt: Path, keys: Keys, verify: Command) -> None:
    signs = ("run", run, "--receipt", run.parent / "r.json", "--key")
    verifies = ("receipt", receipt, "--key")
    for command, wrong in ((signs, keys[1]), (signs, receipt), (verifies, keys[0]), (verifies, run / "none")):
        error = refused(verify(*command, wrong), 2)
        assert "of an elliptic curve in PEM" in error


def test_the_extra_is_named(run: Path, keys: Keys, verify: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("model_signing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "model_signing", None)
    command = ("run", run, "--receipt", run.parent / "r.json")
    assert verify(*command).code == 0
    assert "pip install 'mlm-repro[sign]'" in refused(verify(*command, "--key", keys[0]), 2)


def refused(outcome: Any, code: int) -> str:
    assert outcome.code == code, outcome.err
    assert isinstance(outcome.error, str)
    return outcome.error
