"""A build uses again what does not depend on a changed setting, and joins token files of others."""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mlm_repro.data_pipeline.cli import main
from mlm_repro.data_pipeline.config import TokenizerConfig
from mlm_repro.data_pipeline.imported import import_tokens
from mlm_repro.data_pipeline.tokens.token_file import TokenFile, TokenFileWriter
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.lineage.run import RunDirectory
from tests.commands import Command
from tests.data_pipeline.builds import files_of, in_child
from tests.data_pipeline.conftest import sentences, write_jsonl, write_recipe
from tests.data_pipeline.test_resume import Killer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_jsonl(tmp_path / "a.jsonl", [sentences(40, seed) for seed in range(90)])
    write_recipe(
        tmp_path / "r.toml",
        "jsonl:a.jsonl",
        extra="shard_bytes = 65536\ndecontaminate.test_sets = []",
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_changed_split_reads_and_measures_nothing_again(command: Command, folder: Path) -> None:
    command(main, "mlm-data", "run", "r.toml", ends=0)
    made = sorted(folder.glob("runs/.stages/small/*/*/DONE"))
    assert {path.parts[-3] for path in made} == {"prepare", "tokenizer", "measure"}
    before = [path.stat().st_mtime_ns for path in made]
    other = ("--set", "split.train=4")
    command(main, "mlm-data", "run", "r.toml", *other, ends=0)
    assert [path.stat().st_mtime_ns for path in made] == before
    command(main, "mlm-data", "run", "r.toml", *other, "--runs", "fresh", ends=0)
    assert files_of(folder / "runs/small") == files_of(folder / "fresh/small")
    command(main, "mlm-data", "run", "r.toml", *other, "--set", "length.min_tokens=10000", ends=2)
    prepared = {
        path: when for path, when in zip(made, before, strict=True) if "prepare" in path.parts
    }
    assert {path: path.stat().st_mtime_ns for path in prepared} == prepared, (
        "what is refused leaves the shelf"
    )
    command(main, "mlm-data", "run", "r.toml", "--set", "clean.uncurl_quotes=false", ends=0)
    assert not set(before) & {path.stat().st_mtime_ns for path in prepared}


def until(make: Callable[[Path], RunDirectory], out: Path, at: int, report: Path) -> None:
    """Make `out`, killed at touch `at` of a file; the number of touches goes to `report`."""
    killer = Killer(out, at)
    sys.addaudithook(killer)
    make(out)
    report.write_text(str(killer.count))


def test_a_killed_import_is_no_dataset_and_goes_on(command: Command, folder: Path) -> None:
    command(main, "mlm-data", "run", "r.toml", ends=0)
    small = folder / "runs/small"
    make = partial(import_tokens, small / "train_text_document", TokenizerConfig(path=small))
    assert in_child(until, make, folder / "whole/out", -1, folder / "touches") == 0
    touches = int((folder / "touches").read_text())
    assert touches > 30
    for at in range(1, touches, 4):
        out = folder / str(at) / "out"
        assert os.WIFSIGNALED(in_child(until, make, out, at, folder / "no"))
        is_whole = (out / "COMPLETE").exists()
        assert (command(main, "mlm-data", "stats", out).code == 0) == is_whole
        make(out)
        assert files_of(out) == files_of(folder / "whole/out")


def test_token_files_of_others_become_datasets(command: Command, folder: Path) -> None:
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    command(main, "mlm-data", "run", "r.toml", ends=0)
    source = folder / "runs/small/train_text_document"
    command(main, "mlm-data", "import", source, "own", "--tokenizer", "runs/small", ends=0)
    whole = TokenFile(source)
    parts = [megatron.IndexedDataset(f"own/{name}_text_document") for name in ("train", "valid")]
    assert np.array_equal(
        np.concatenate([part[n] for part in parts for n in range(len(part))]), whole.tokens
    )
    Tokenizer.train([sentences(40, 1)], 270).save(folder / "fewer")
    refused = command(main, "mlm-data", "import", source, "no", "--tokenizer", "fewer", ends=2)
    assert "has the token" in refused.error
    with TokenFileWriter(folder / "wide", np.dtype(np.int32)) as writer:
        writer.add_documents([1, 2, 3, 4], [2, 2])
    command(main, "mlm-data", "import", "wide", "int32", "--tokenizer", "runs/small", ends=0)
    assert TokenFile(Path("int32/train_text_document")).dtype == np.int32
    with TokenFileWriter(folder / "below", np.dtype(np.int32)) as writer:
        writer.add_documents([1, 2, -3, 4], [2, 2])
    refused = command(
        main, "mlm-data", "import", "below", "no", "--tokenizer", "runs/small", ends=2
    )
    assert "has the token id -3, and the tokenizer" in refused.error
    assert not Path("no").exists()
