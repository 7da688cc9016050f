"""Scores of a run's checkpoints by protocols of `mlm-eval`, which is a process of its own. Imports
no torch."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.processes import end_with_parent

SCORES = "scores"
"""Folder of a run for files such as `iter_0000100/lambada.json`: what `mlm-eval lambada --json`
writes of that checkpoint."""
PROGRAM = Path(sys.executable).with_name("mlm-eval")


def check_protocols(protocols: Sequence[str]) -> None:
    """Raise BadInput, with the last sentence that `mlm-eval check` prints, if that program, which
    is run here in a process of its own, refuses one of the protocols: it does not exist, or its
    test file is not here and cannot be downloaded. Without protocols nothing is run. Nothing is
    returned."""
    if protocols:
        done = subprocess.run([PROGRAM, "check", *protocols], capture_output=True, text=True)
        if done.returncode:
            raise BadInput(done.stderr.strip().rpartition("\n")[2].removeprefix("error: "))


def start_scoring(checkpoint: Path, protocol: str) -> "subprocess.Popen[bytes] | None":
    """Start a process that scores a run's checkpoint, by its path, by a protocol of `mlm-eval`, and
    return the process, which the caller waits for and which, on Linux, ends with this one. It
    writes `scores/CHECKPOINT/PROTOCOL.json` in the run's directory. Return None, and start nothing,
    if that file exists."""
    path = checkpoint.parents[1] / SCORES / checkpoint.name / f"{protocol}.json"
    if path.is_file():
        return None
    return subprocess.Popen(
        [PROGRAM, "run", protocol, "--ckpt", checkpoint, "--json", path, "--quiet"],
        # It would else take itself for a rank of the training.
        env=os.environ | {"WORLD_SIZE": "1"},
        stdout=subprocess.DEVNULL,
        preexec_fn=end_with_parent,
    )
