"""Every command that writes ends with code 2 and one sentence where it cannot: before it works, and
leaving nothing."""

import ctypes
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.commands import call
from tests.data_pipeline.conftest import sentences, write_recipe
from tests.engine.conftest import write_dataset
from tests.engine.small_run import write_toml
from tests.engine.test_formats_checkpoint import write_rough

COMMANDS = {
    "mlm-data": [
        "run recipe.toml --runs {}",
        "clean jsonl:corpus.jsonl {} --set workers=1",
        "fetch {}",
    ],
    "mlm-train": ["run small.toml --runs {}", "export checkpoint {}"],
    "mlm-eval": [
        "perplexity corpus.jsonl --ckpt checkpoint --set workers=1 --json {}/a",
        "perplexity corpus.jsonl --ckpt checkpoint --set workers=1 --samples {}/a",
        "oracle --out {}",
    ],
    "mlm-experiment": [
        "launch 8.3b --out {}",
        "simulate ptd-p-runs --out {}/a",
        "run 2021/table-1 --runs {}",
    ],
    "mlm-verify": [
        "against megatron-core small.toml --iterations 1 --out {}",
        "layouts torch --json {}/a",
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read."""
    folder = tmp_path_factory.mktemp("places")
    corpus = folder / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": sentences(20, number)}) + "\n" for number in range(20))
    )
    write_recipe(folder / "recipe.toml", f"jsonl:{corpus}", extra="decontaminate.test_sets = []")
    write_toml(folder / "small.toml", write_dataset(folder / "dataset"))
    write_rough(folder / "checkpoint")
    return folder


def read_only(folder: Path) -> Path:
    (folder / "closed").mkdir(0o555, exist_ok=True)
    return folder / "closed" / "deep"


def a_file(folder: Path) -> Path:
    (folder / "file").write_bytes(b"")
    return folder / "file"


def circle(folder: Path) -> Path:
    (folder / "circle").unlink(missing_ok=True)
    (folder / "circle").symlink_to("circle")
    return folder / "circle"


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("process", ctypes.c_int)]


class _Rights(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


def without_rights() -> None:
    """Root is from here on a user like any other to files, and so is what it starts
    (capabilities(7))."""
    if os.geteuid():
        return
    system, header, rights = ctypes.CDLL(None), _Header(0x20080522, 0), (_Rights * 2)()
    for right in (1, 2, 3):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
        system.prctl(24, right, 0, 0, 0)  # PR_CAPBSET_DROP
    assert system.capget(ctypes.byref(header), rights) == 0
    for name in ("effective", "permitted", "inheritable"):
        setattr(rights[0], name, getattr(rights[0], name) & ~0b1110)
    assert system.capset(ctypes.byref(header), rights) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="root has rights of another kind elsewhere")
@pytest.mark.parametrize("place", [read_only, a_file, circle])
@pytest.mark.parametrize("program", COMMANDS)
def test_a_place_that_cannot_be_written_is_named(
    program: str, place: Callable[[Path], Path], folder: Path
) -> None:
    where = place(folder)
    before = sorted(folder.rglob("*"))
    for words in COMMANDS[program]:
        arguments = words.format(where).split()
        done = call({}, program, *arguments, folder=folder, ends=2, prepare=without_rights)
        assert done.but_cost == f"{done.error}\n", words
        assert str(where.relative_to(folder).parts[0]) in done.error, words
        assert sorted(folder.rglob("*")) == before, words


@pytest.mark.skipif(sys.platform != "linux", reason="root has rights of another kind elsewhere")
def test_a_run_that_its_name_cannot_be_made_to_lead_to_is_told(
    folder: Path, tmp_path: Path
) -> None:
    command = ("mlm-data", "run", "recipe.toml", "--runs", tmp_path)
    call({}, *command, folder=folder, ends=0)
    link = tmp_path / "small"
    run = link.resolve()
    link.unlink()
    for closed in (tmp_path, run):
        closed.chmod(0o555)
    done = call({}, *command, folder=folder, ends=2, prepare=without_rights)
    tmp_path.chmod(0o755)
    assert done.error == (
        f"error: {link} cannot be linked to {run.name}: Permission denied; let this user write in"
        " that folder, or name another folder for the runs"
    )
