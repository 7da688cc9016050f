"""A build uses again what does not depend on a changed setting, is done in parts, and joins token files of others."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.cli import main
from data_pipeline.tokens.token_file import TokenFile
from data_pipeline.tokens.tokenizer import Tokenizer
from tests.commands import Command
from tests.data_pipeline.conftest import sentences, write_jsonl

RECIPE = """
name = "small"
workers = 1
shard_bytes = 65536
[sources]
names = ["jsonl:a.jsonl"]
[decontaminate]
test_sets = []
[tokenizer]
kind = "train"
vocab_size = 300
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_jsonl(tmp_path / "a.jsonl", [sentences(40, seed) for seed in range(90)])
    (tmp_path / "r.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(run: Path) -> dict[str, bytes]:
    """Every file of a dataset but those that say when it was made."""
    dated = ("manifest.json", "ledger.json", "COMPLETE")
    files = (path for path in run.rglob("*") if path.is_file() and path.name not in dated)
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def test_a_changed_split_reads_and_measures_nothing_again(command: Command, folder: Path) -> None:
    command(main, "mlm-data", "run", "r.toml", ends=0)
    made = sorted(folder.glob("runs/.stages/small/*/*/DONE"))
    assert {path.parts[-3] for path in made} == {"prepare", "tokenizer", "measure"}
    before = [path.stat().st_mtime_ns for path in made]
    other = ("--set", "split.train=4")
    said = command(main, "mlm-data", "run", "r.toml", *other, "--dry-run", ends=0).err
    assert "by a rehearsal on the first" in said
    assert "uses again what source, clean, language, length made" in said
    command(main, "mlm-data", "run", "r.toml", *other, ends=0)
    assert [path.stat().st_mtime_ns for path in made] == before
    command(main, "mlm-data", "run", "r.toml", *other, "--runs", "fresh", ends=0)
    assert written(folder / "runs/small") == written(folder / "fresh/small")
    command(main, "mlm-data", "run", "r.toml", "--set", "clean.uncurl_quotes=false", ends=0)
    assert not set(before) & {path.stat().st_mtime_ns for path in made if "prepare" in path.parts}


def test_parts_of_an_array_give_the_bytes_of_one_command(command: Command, folder: Path) -> None:
    line = [sys.executable, "-c", "from data_pipeline.cli import main; main()", "run", "r.toml", "--runs", "parts"]
    parts = [subprocess.Popen([*line, "--part", f"{number}/3"]) for number in (3, 1, 2)]
    assert [part.wait(300) for part in parts] == [0, 0, 0]
    command(main, "mlm-data", "run", "r.toml", ends=0)
    assert written(folder / "parts/small") == written(folder / "runs/small")
    assert "such as 2/8" in command(main, "mlm-data", "run", "r.toml", "--part", "4/3", ends=2).error


def test_token_files_of_others_become_datasets_that_merge(command: Command, folder: Path) -> None:
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    command(main, "mlm-data", "run", "r.toml", ends=0)
    source = folder / "runs/small/train_text_document"
    command(main, "mlm-data", "import", source, "own", "--tokenizer", "runs/small", ends=0)
    command(main, "mlm-data", "merge", "own", "runs/small", "both", ends=0)
    whole, parts = (
        TokenFile(source),
        [megatron.IndexedDataset(f"own/{name}_text_document") for name in ("train", "valid")],
    )
    assert np.array_equal(np.concatenate([part[n] for part in parts for n in range(len(part))]), whole.tokens)
    both = megatron.IndexedDataset("both/train_text_document")
    assert len(both) == len(parts[0]) + len(whole)
    assert np.array_equal(both[len(both) - 1], whole[len(whole) - 1])
    Tokenizer.train([sentences(40, 1)], 270).save(folder / "fewer")
    refused = command(main, "mlm-data", "import", source, "no", "--tokenizer", "fewer", ends=2)
    Tokenizer.train([sentences(40, 1)], 270).save(folder / "fewer")
    refused = command(main, "mlm-data", "import", source, "no", "--tokenizer", "fewer", ends=2)
    assert "has the token" in refused.error
