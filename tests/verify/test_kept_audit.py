"""The kept audit: a twin of the 8.3B model that eight ranks trained, every segment of which one rank trained again."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from lineage.files import read_object
from lineage.receipt import read_receipt
from tests.commands import Command

AUDITS = Path(__file__).parents[2] / "results" / "audits"
KEY = AUDITS / "auditor.pem"
(RECEIPT,) = AUDITS.glob("*.receipt.json")
RUN = AUDITS / RECEIPT.name.removesuffix(".receipt.json")
"""Without what its checkpoints hold but their seals, which have the digests."""
SUBJECTS = read_receipt(RECEIPT).subjects


def manifest() -> dict[str, Any]:
    return read_object(RUN / "manifest.json")


def test_the_auditors_signature_is_on_the_run_as_it_is_kept(verify: Command) -> None:
    done = verify("receipt", RECEIPT, "--key", KEY, RUN)
    assert done.code == 0, done.err
    assert done.out.startswith(f"replay of {RUN.name}, 6 of 6 segments at serial, 20")


def test_eight_ranks_were_audited_by_one_on_the_same_numerics() -> None:
    config, audit = manifest()["config"], read_receipt(RECEIPT).audit
    assert config["name"] == "8.3b-twin"
    assert config["train"]["invariant"] == 2
    assert read_object(RUN / "summary.json")["layout"] == {"tp": 2, "pp": 2, "dp": 2}
    assert (audit.layout, audit.differs) == ("serial", [])
    assert audit.numerics == manifest()["environment"]["numerics"]


def test_each_checkpoint_names_the_digests_of_weights_and_moments() -> None:
    segments = read_receipt(RECEIPT).audit.segments
    for segment in segments:
        files = read_object(RUN / "checkpoints" / f"iter_{segment.end:07d}" / "COMPLETE")["files"]
        tensors = [name for name in files if name.endswith(".safetensors")]
        assert len(tensors) == 8  # of two tensor- and two pipeline-parallel ranks, weights and moments


@pytest.mark.parametrize("name", [name for name in SUBJECTS if "iter_" not in name or "iter_0000010" in name])
def test_a_kept_file_that_was_changed_is_named(name: str, verify: Command, tmp_path: Path) -> None:
    run = shutil.copytree(RUN, tmp_path / RUN.name)
    (run / name).write_bytes((run / name).read_bytes() + b"\n")
    refused = verify("receipt", RECEIPT, "--key", KEY, run)
    assert refused.code == 6
    assert f"{name} is another" in refused.err
