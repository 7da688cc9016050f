"""A command that is told to end does so at once, and takes what it made for a moment with it."""

import signal
import tempfile
import time
from pathlib import Path

from mlm_repro.engine import formats
from mlm_repro.engine.formats.convert import export_checkpoint
from tests.commands import Program
from tests.engine.test_formats_checkpoint import write_rough


def stand_still_with_the_copy() -> None:
    """Have the command stop for ten minutes once its copy is whole: it is there for some milliseconds otherwise."""
    write = formats.write_checkpoint

    def write_and_wait(directory: Path, content: object) -> None:
        write(directory, content)  # type: ignore[arg-type]
        time.sleep(600)

    formats.write_checkpoint = write_and_wait  # type: ignore[assignment]
    tempfile.tempdir = None  # what the process it was forked from had found


def test_an_imported_copy_does_not_outlive_the_command(tmp_path: Path) -> None:
    write_rough(tmp_path / "ours")
    theirs, place, text = (
        export_checkpoint(tmp_path / "ours", tmp_path / "theirs"), tmp_path / "tmp", tmp_path / "text",
    )  # fmt: skip
    place.mkdir()
    text.write_text("the river sleeps")
    process = Program(
        "mlm-eval", "perplexity", text, "--ckpt", theirs, "--set", "workers=1",
        environment={"TMPDIR": str(place)}, prepare=stand_still_with_the_copy,
    )  # fmt: skip
    try:
        while not list(place.glob("mlm-eval-*/imported/COMPLETE")):
            assert process.poll() is None, process.err
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.wait() == 7
    assert err.splitlines()[-1] == "error: interrupted; the same command continues from what was finished"
    assert "Traceback" not in err
    assert (out, list(place.iterdir())) == ("", [])
