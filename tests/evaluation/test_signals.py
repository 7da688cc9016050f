"""A command that is told to end does so at once, and takes what it made for a moment with it."""

import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mlm_repro.engine import formats
from mlm_repro.engine.formats.convert import export_checkpoint
from mlm_repro.evaluation.cli import main
from tests.engine.test_formats_checkpoint import write_rough


def stand_still_with_the_copy() -> None:
    """Have the command stop for ten minutes once its copy is whole: it is there for some
    milliseconds otherwise."""
    write = formats.write_checkpoint

    def write_and_wait(directory: Path, content: object) -> None:
        write(directory, content)  # type: ignore[arg-type]
        time.sleep(600)

    formats.write_checkpoint = write_and_wait  # type: ignore[assignment]
    tempfile.tempdir = None  # what the process it was forked from had found


def evaluate(words: list[str], place: Path, said: Path) -> None:
    """The command in a process of its own, forked from this one: it waits for no import."""
    os.setsid()
    os.environ["TMPDIR"] = str(place)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(said / name, os.O_WRONLY | os.O_CREAT, 0o600), number)
        stream = os.fdopen(number, "w", 1, encoding="utf-8", closefd=False)
        for each in (name, f"__{name}__"):
            setattr(sys, each, stream)
    stand_still_with_the_copy()
    sys.argv = ["mlm-eval", *words]
    main()


def test_an_imported_copy_does_not_outlive_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rough(tmp_path / "ours")
    # Which would compute the losses of the export beside ours.
    monkeypatch.setitem(sys.modules, "transformers", None)
    theirs, place, text = (
        export_checkpoint(tmp_path / "ours", tmp_path / "theirs"),
        tmp_path / "tmp",
        tmp_path / "text",
    )
    place.mkdir()
    text.write_text("the river sleeps")
    words = ["perplexity", str(text), "--ckpt", str(theirs), "--set", "workers=1"]
    process = multiprocessing.get_context("fork").Process(
        target=evaluate, args=(words, place, tmp_path)
    )
    process.start()
    out, err = tmp_path / "stdout", tmp_path / "stderr"
    try:
        while not list(place.glob("mlm-eval-*/imported/COMPLETE")):
            assert process.is_alive(), err.read_text()
            time.sleep(0.05)
        process.terminate()
        process.join(300)
    finally:
        process.kill()
    assert process.exitcode == 7
    assert (
        err.read_text().splitlines()[-1]
        == "error: interrupted; the same command continues from what was finished"
    )
    assert "Traceback" not in err.read_text()
    assert (out.read_text(), list(place.iterdir())) == ("", [])
