"""A command that is told to end does so at once, and takes what it made for a moment with it."""

import os
import subprocess
import sys
import time
from pathlib import Path

from mlm_repro.engine.formats.convert import export_checkpoint
from tests.engine.test_formats_checkpoint import write_rough

COMMAND = [sys.executable, "-c", "from mlm_repro.evaluation.cli import main; main()", "perplexity"]


def test_an_imported_copy_does_not_outlive_the_command(tmp_path: Path) -> None:
    write_rough(tmp_path / "ours")
    theirs, place, text = (
        export_checkpoint(tmp_path / "ours", tmp_path / "theirs"), tmp_path / "tmp", tmp_path / "text",
    )  # fmt: skip
    place.mkdir()
    text.write_text(" ".join(f"the river {number} sleeps" for number in range(100_000)))
    command = [*COMMAND, str(text), "--ckpt", str(theirs), "--set", "workers=1"]
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
