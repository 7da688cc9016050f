"""What an earlier version sealed still verifies, reports, resumes and scores: a reproduction, its
data, its training.

`sealed_at_ba375c5.tar.gz` is what the commit of that name made of 24 made-up documents.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from mlm_repro.engine.run.files import read_metrics
from tests.commands import Program
from tests.experiments.packed import DATASET, REPRODUCTION, TRAINING, unpack


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """The folder that has `runs` in it."""
    return unpack(tmp_path)


def call(sealed: Path, program: str, *arguments: str) -> str:
    """What a command says there, on either stream; it must succeed."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MLM_DATA_DIR", "RANK", "WORLD_SIZE")
    }
    environment = clean | {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(sealed / "cache")}
    process = Program(program, *arguments, environment=environment, folder=sealed)
    out, err = process.communicate(600)
    assert process.wait() == 0, err
    return out + err


def only(sealed: Path, pattern: str) -> Path:
    (path,) = (sealed / "runs").glob(pattern)
    return path


def test_they_verify_and_a_changed_byte_is_named(sealed: Path) -> None:
    for pattern in (DATASET, TRAINING, REPRODUCTION):
        call(sealed, "mlm-verify", "run", str(only(sealed, pattern)))
    ledger = only(sealed, REPRODUCTION) / "ledger.json"
    ledger.write_bytes(ledger.read_bytes().replace(b"24", b"42", 1))
    with pytest.raises(AssertionError, match=r"ledger\.json"):
        call(sealed, "mlm-verify", "run", str(ledger.parent))


def test_the_page_shows_their_numbers(sealed: Path) -> None:
    run = only(sealed, REPRODUCTION)
    call(sealed, "mlm-report", "build", str(run), "runs")
    page = (run / "report" / "index.html").read_text(encoding="utf-8")
    assert "damaged" not in page
    last = [
        line for line in read_metrics(only(sealed, TRAINING)) if line["kind"] == "final-validation"
    ][-1]
    assert str(last["perplexity"]) in page


def test_a_training_that_was_cut_off_goes_on_to_the_same_end(sealed: Path) -> None:
    run = only(sealed, TRAINING)
    before = read_metrics(run)
    for path in (run / "COMPLETE", run / "summary.json"):
        path.unlink()
    shutil.rmtree(run / "checkpoints" / "iter_0000006")
    call(sealed, "mlm-train", "resume", str(run.relative_to(sealed)))
    call(sealed, "mlm-verify", "run", str(run))
    after = read_metrics(run)
    for old, new in zip(before, after, strict=True):
        assert (new["kind"], new["iteration"]) == (old["kind"], old["iteration"])
        assert new["loss"] == pytest.approx(old["loss"], abs=1e-4)


def test_its_checkpoint_scores_the_same(sealed: Path) -> None:
    stored = json.loads(
        (only(sealed, REPRODUCTION) / "evaluations" / "355m-wikitext103.json").read_text()
    )
    checkpoint = str(only(sealed, TRAINING))
    call(
        sealed,
        "mlm-eval",
        "wikitext103",
        "--ckpt",
        checkpoint,
        "--json",
        "again.json",
        "--limit",
        "4",
    )
    again = json.loads((sealed / "again.json").read_text())
    assert again["checkpoint_digest"] == stored["checkpoint_digest"]
    for name in ("loss_per_token", "bits_per_byte", "subword_perplexity"):
        assert again[name] == pytest.approx(stored[name], rel=1e-5)
    assert again["num_original_tokens"] == stored["num_original_tokens"]
