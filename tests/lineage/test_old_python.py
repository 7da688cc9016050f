"""A Python that is too old gets one sentence and exit code 2: from every command, and from what sets the package up."""

import subprocess
import sys

import pytest

from tests.architecture.rooms import ROOT, command_names

PRETEND = "import sys; sys.version_info = (3, 10, 13, 'final', 0);"


@pytest.mark.parametrize("command", command_names())
def test_a_command_says_so(command: str) -> None:
    module = command_names()[command].partition(":")[0]
    code = [sys.executable, "-c", f"{PRETEND} import {module}"]
    done = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, timeout=300)
    sentence = "error: Python 3.11 or newer is needed, this is 3.10.13\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)
