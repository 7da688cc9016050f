"""Lets the parts of an array of jobs find one another, compare their work, and notice when one has
died.

Each part has a sign, a file that a thread rewrites with a growing count and with the facts that the
part works on. A part lives as long as its sign changes while another part watches, by the watcher's
clock, because the clocks of nodes differ.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Self, TypeVar

from mlm_repro.lineage.atomic import JSON, read_json
from mlm_repro.lineage.errors import BadInput, Interrupted
from mlm_repro.lineage.progress import is_quiet
from mlm_repro.lineage.variables import JOIN_SECONDS, number

MEETINGS = ".parts"
"""Folder beside the runs that holds the signs of all parts, in a folder for each run's name."""
BEAT_SECONDS = 0.5
"""Seconds between two updates of a part's own sign."""
LOOK_SECONDS = 3.0
"""Longest time in seconds that the sign of a living part stays unchanged."""
ASK_SECONDS = 0.25
"""Seconds between two looks at the signs of the other parts."""
SAID_AFTER_SECONDS = 5.0
"""Seconds after which a part prints which part it waits for; each further message takes four times
as long."""
DEFAULT_JOIN_SECONDS = 300
Sign = JSON
T = TypeVar("T")


class Meeting:
    """Context manager of one part, `part` of `parts` from 1 on, of an array of jobs that build one
    dataset. In `folder`, which all parts share, a file that a thread rewrites shows the other parts
    that this one lives and on which facts it works. A part that ends by an error after `agree` says
    so in its file. Any other end removes the file, and an end of part 1 without an error the files
    of all parts.

    The method `agree` adds facts and raises BadInput if a living part has other values of them.
    `wait_for` waits for the result of another part, and raises Interrupted if that part has ended
    by an error or gives no sign of life for MLM_JOIN_SECONDS, BadInput if it works on other facts.
    """

    def __init__(self, folder: Path, part: int, parts: int) -> None:
        self.part = part
        self.parts = parts
        self._folder = folder
        self._limit = number(JOIN_SECONDS) or DEFAULT_JOIN_SECONDS
        self._place = folder / f"part-{part}-{os.urandom(8).hex()}.json"
        self._sign: Sign = {"part": part, "count": 0, "facts": {}, "said": ""}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._writing = threading.Lock()  # the thread and this part's own calls write one file

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, sign in read_signs(self._folder).items():
            if sign["said"]:  # left by a part of an earlier attempt, which has ended
                (self._folder / name).unlink(missing_ok=True)
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._ended.set()
        self._thread.join()
        if error is not None and self._sign["facts"]:
            self._sign["said"] = str(error) or "it was interrupted"
            self._write()
            return
        is_done = error is None and self.part == 1
        with suppress(OSError):  # a folder that other parts still use is not empty
            for path in self._folder.iterdir() if is_done else [self._place]:
                path.unlink(missing_ok=True)
            self._folder.rmdir()
            self._folder.parent.rmdir()

    def agree(self, facts: dict[str, str]) -> None:
        """Add `facts`, texts by name such as a setting's value or a file's digest, to the facts
        that this part of an array of jobs shows the other parts. Raises BadInput, with the names of
        the facts that differ, if a living part has other values of the same facts; a part with
        other values is watched for LOOK_SECONDS, to see that it lives."""
        facts = self._sign["facts"] | facts
        until = monotonic() + LOOK_SECONDS
        before = read_signs(self._folder)
        while any(_differing(facts, sign) for sign in before.values()) and monotonic() < until:
            self._check(facts, before, read_signs(self._folder))
            sleep(ASK_SECONDS)
        self._sign["facts"] = facts
        self._write()

    def _check(
        self, facts: dict[str, str], before: dict[str, Sign], signs: dict[str, Sign]
    ) -> None:
        """Raise BadInput, with the names of the facts that differ, if a living part of the array of
        jobs has other values than `facts` under the same names. A part lives if its sign, by file
        name, has changed from `before` to `signs` and does not say that it has ended."""
        for sign in (sign for name, sign in signs.items() if sign != before.get(name)):
            if differing := _differing(facts, sign):
                raise BadInput(
                    f"part {self.part} of {self.parts} differs from part {sign['part']}, which is"
                    f" at work, in {', '.join(differing)}: parts need one recipe, input, code and"
                    " Python"
                )

    def wait_for(self, ready: Callable[[], T | None], part: int, state: Callable[[], str]) -> T:
        """Call the function `ready` again and again until it returns another value than None, which
        the work of part number `part` of the job array makes possible, and return that value. The
        function `state` returns a text on how far the work is; it is printed to standard error now
        and then, unless `--quiet` was given, and stands in the error for a silent part.

        Raises Interrupted if that part ends before the value is there or gives no sign of life for
        MLM_JOIN_SECONDS, and BadInput if that part works on other facts, such as another recipe.
        """
        began = heard = monotonic()
        told = SAID_AFTER_SECONDS
        signs = read_signs(self._folder, part)
        while (value := ready()) is None:
            before = signs
            signs = read_signs(self._folder, part)
            now = monotonic()
            heard = now if signs != before else heard
            self._check(self._sign["facts"], before, signs)
            if ended := [sign["said"] for sign in signs.values() if sign["said"]]:
                raise Interrupted(
                    f"part {part} has ended: {ended[0]}; give the commands of all parts again,"
                    " which keep what was finished"
                )
            if now - heard > self._limit:
                raise Interrupted(
                    f"part {part} of {self.parts} gave no sign of life for {self._limit} seconds"
                    f" ({JOIN_SECONDS} sets how many), and {state()}: give its command again, and"
                    " those of all parts that ended; what was finished is kept"
                )
            if now - began > told and not is_quiet():
                print(
                    f"waiting for part {part} of {self.parts}: {state()}",
                    file=sys.stderr,
                    flush=True,
                )
                told *= 4
            sleep(ASK_SECONDS)
        return value

    def _beat(self) -> None:
        while True:
            self._sign["count"] += 1
            self._write()
            if self._ended.wait(BEAT_SECONDS):
                return

    def _write(self) -> None:
        with self._writing, suppress(OSError):  # the first part has ended and removed the folder
            fresh = self._place.with_suffix(".new")
            fresh.write_text(json.dumps(self._sign), encoding="utf-8")
            os.replace(fresh, self._place)


def _differing(facts: dict[str, str], sign: Sign) -> list[str]:
    """Return the sorted names of the facts that `facts` and the sign of another part both have,
    with different values; an empty list if that part has ended."""
    theirs = {} if sign["said"] else sign["facts"]
    return sorted(name for name in facts.keys() & theirs.keys() if facts[name] != theirs[name])


def read_signs(folder: Path, part: int | str = "*") -> dict[str, Sign]:
    """Return a dict file name → JSON content, as a dict, of the sign files in a folder: of the part
    `part`, or of all parts. A file that cannot be read, such as one that is removed meanwhile, is
    left out. Raises ValueError if one is not JSON."""
    signs = {}
    for path in folder.glob(f"part-{part}-*.json"):
        with suppress(OSError):  # the first part has ended and removed it
            signs[path.name] = dict(read_json(path))
    return signs
