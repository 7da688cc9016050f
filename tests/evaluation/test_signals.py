"""A command that is told to end does so at once, and takes what it made for a moment with it."""

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_pipeline.tokens.tokenizer import Tokenizer
from engine.formats import write_checkpoint
from engine.formats.convert import export_checkpoint
from tests.commands import Program
from tests.engine.test_formats_checkpoint import CONFIG, imported, rough_model, write_rough

COMMAND = [sys.executable, "-c", "from evaluation.cli import main; main()", "perplexity"]


def test_an_imported_copy_does_not_outlive_the_command(tmp_path: Path) -> None:
    write_rough(tmp_path / "ours")
    theirs, place, text = (
        export_checkpoint(tmp_path / "ours", tmp_path / "theirs"),
        tmp_path / "tmp",
        tmp_path / "text",
    )
    place.mkdir()
    text.write_text(" ".join(f"the river {number} sleeps" for number in range(100_000)))
    command = [*COMMAND, str(text), "--ckpt", str(theirs), "--workers", "1"]
    environment = {**os.environ, "TMPDIR": str(place)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not list(place.glob("mlm-eval-*/imported/COMPLETE")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        _, err = process.communicate(timeout=120)
    assert process.returncode == 7
    assert err.splitlines()[-1] == "error: interrupted; the same command continues from what was finished"
    assert "Traceback" not in err
    assert list(place.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_ctrl_c_is_heard_while_one_word_is_cut_into_tokens(tmp_path: Path) -> None:
    """Of the half minute and more that its 64 million letters take, ten seconds are not waited for."""
    merging = Tokenizer.train(["a" * (1 << 14)], CONFIG.vocab_size)
    write_checkpoint(tmp_path / "checkpoint", dataclasses.replace(imported(rough_model()), tokenizer=merging))
    (tmp_path / "text").write_text("a" * ((64 << 20) - 2) + " b")
    command = Program("mlm-eval", "perplexity", "text", "--ckpt", "checkpoint", "--workers", 1, folder=tmp_path)
    code, seconds = command.interrupt_at(6, timeout=120)
    assert code == 7
    assert seconds < 10
    assert command.err == "error: interrupted; the same command continues from what was finished\n"
