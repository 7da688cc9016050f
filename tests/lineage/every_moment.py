"""A command, run again and again from when its work is over: each time SIGTERM comes an instruction
later, until it comes too late to stop anything.

`python -P every_moment.py END` prints a list of what became of each: exit code, negative for a
signal, and what was said. END is how the work ends: "nothing", or the name of the error that it
raises.
"""

import builtins
import json
import os
import signal
import sys
import tempfile
from functools import partial
from types import FrameType
from typing import Any

from mlm_repro.lineage import command, errors

NEVER = 1_000_000


def interrupt_after(instructions: int) -> None:
    """Let SIGTERM come after so many instructions of `lineage/command.py`."""
    left = instructions

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != command.__file__:
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if left < 0:
            sys.settrace(None)
            signal.raise_signal(signal.SIGTERM)
        return trace

    running = sys._getframe()
    while running := running.f_back:  # type: ignore[assignment]
        running.f_trace, running.f_trace_opcodes = trace, True
    sys.settrace(trace)


def work(end: str, instructions: int, **_: object) -> None:
    """The work of the command."""
    interrupt_after(instructions)
    if end != "nothing":
        raise getattr(errors, end, getattr(builtins, end, None))("one clear sentence")


def ended(end: str, instructions: int) -> tuple[int, str]:
    """Exit code of a copy of this process that runs the command, and what it said."""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if not child:
            for stream in (1, 2):
                os.dup2(said.fileno(), stream)
            sys.argv = ["program"]
            command.run_command(partial(work, end, instructions))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return code, said.read().decode()


def main() -> None:
    """Entry point; the last one is of a copy that no signal met."""
    (end,), found = sys.argv[1:], list[tuple[int, str]]()
    whole = ended(end, NEVER)
    while not found or found[-1] != whole:
        found.append(ended(end, len(found)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
