"""The place where the parts of an array of jobs meet: they agree before they work, and hear whether others live.

Each part has a sign, a file that a thread writes again and again with a growing count. A part lives as long as its sign
changes while somebody looks, by the clock of the one who looks: clocks of nodes differ. An agreement is a file that
exactly one part can make. It holds as long as one of the parts that agreed to it lives.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from mlm_repro.data_pipeline.work.origin import differences
from mlm_repro.lineage.atomic import read_json, write_json
from mlm_repro.lineage.errors import BadInput, Interrupted
from mlm_repro.lineage.progress import is_quiet
from mlm_repro.lineage.variables import JOIN_SECONDS, number

MEETINGS = ".parts"
"""Folder beside the runs with a meeting for each name of a run."""
BEAT_SECONDS, LOOK_SECONDS, ASK_SECONDS = 0.5, 3.0, 0.25
"""Seconds from one count of a sign to the next, that a sign may stay the same, and from one look to the next."""
SAID_AFTER_SECONDS = 5.0
"""After so long a part says whom it awaits, and again each time after four times as long."""
DEFAULT_JOIN_SECONDS = 300
Sign = dict[str, Any]
T = TypeVar("T")


class Meeting:
    """The meeting of part number `part`, from 1, of so many `parts`, in a folder that their machines share."""

    def __init__(self, folder: Path, part: int, parts: int) -> None:
        self.part, self.parts, self._folder = part, parts, folder
        self._limit = number(JOIN_SECONDS) or DEFAULT_JOIN_SECONDS
        self._sign: Sign = {"session": os.urandom(8).hex(), "count": 0, "agreed": {}, "said": ""}
        self._heard: dict[int, tuple[Sign, float]] = {}
        self._ended, self._thread = threading.Event(), threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        for part in range(1, self.parts + 1):
            self._hear(part)
        self._entered = time.monotonic()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._ended.set()
        if self._thread.ident:
            self._thread.join()
            if error is None:
                self._place(self.part).unlink(missing_ok=True)
                for path in self._folder.glob("agreed-*") if self.part == 1 else ():
                    path.unlink(missing_ok=True)
            else:
                self._sign["said"] = str(error) or "it was interrupted"
                self._write()
        with suppress(OSError):  # others are there
            self._folder.rmdir()
            self._folder.parent.rmdir()

    def agree(self, topic: str, facts: Mapping[str, str]) -> None:
        """Agree with the other parts. Raises BadInput, with what differs, if a living part agreed on other facts."""
        while True:
            made = sorted(self._folder.glob(f"agreed-{topic}-*.json"))
            try:
                last = read_json(made[-1]) if made else {}
            except (OSError, ValueError):  # the first part has ended and removed it
                continue
            if last.get("facts") == facts:
                break
            if made and is_alive(self._folder, topic, made[-1].name):
                raise BadInput(
                    f"part {self.part} of {self.parts} differs from part {last['part']}, which is at work, in "
                    f"{'; '.join(differences(last['facts'], facts))}: parts need one recipe, input, code and Python"
                )
            made.append(self._folder / f"agreed-{topic}-{len(made):06d}.json")
            if write_json(made[-1], {"part": self.part, "facts": facts}, replaces=False):
                break
        self._sign["agreed"] = self._sign["agreed"] | {topic: made[-1].name}
        if not self._thread.ident:
            self._thread.start()

    def wait_for(self, ready: Callable[[], T | None], part: int, state: Callable[[], str]) -> T:
        """The first result of `ready` that is not None, which another part makes; `state` says how far that is.

        Raises Interrupted when that part ends without it, or gives no sign of life for MLM_JOIN_SECONDS.
        """
        began, told = time.monotonic(), SAID_AFTER_SECONDS
        while (value := ready()) is None:
            sign, heard = self._hear(part)
            now, said = time.monotonic(), sign.get("said")
            if said and heard > self._entered:
                raise Interrupted(f"part {part} has ended: {said}; give the commands of all parts again")
            if now - max(heard, began) > self._limit:
                before = f"; before that it said: {said}" if said else ""
                raise Interrupted(
                    f"part {part} of {self.parts} gave no sign of life for {self._limit} seconds ({JOIN_SECONDS}), and "
                    f"{state()}: give its command again, and those of all parts that ended{before}"
                )
            if now - began > told and not is_quiet():
                print(f"waiting for part {part} of {self.parts}: {state()}", file=sys.stderr, flush=True)
                told *= 4
            time.sleep(ASK_SECONDS)
        return value

    def _hear(self, part: int) -> tuple[Sign, float]:
        """A part's sign, and when this part first saw it as it is."""
        before = self._heard.get(part)
        sign = _read(self._place(part), before[0] if before else {})
        if before is None or before[0] != sign:
            self._heard[part] = sign, time.monotonic()
        return self._heard[part]

    def _beat(self) -> None:
        while True:
            self._sign["count"] += 1
            self._write()
            if self._ended.wait(BEAT_SECONDS):
                return

    def _write(self) -> None:
        with suppress(OSError):  # the first part has ended and removed the folder
            self._place(self.part).write_text(json.dumps(self._sign), encoding="utf-8")

    def _place(self, part: int) -> Path:
        return self._folder / f"part-{part}.json"


def is_alive(folder: Path, topic: str = "", name: str = "") -> bool:
    """True if a sign of a meeting, of those that agreed to `name`, changes while it is looked at."""
    until, before = time.monotonic() + LOOK_SECONDS, _signs(folder, topic, name)
    while (now := _signs(folder, topic, name)) == before or not now:
        if time.monotonic() > until or not folder.exists():
            return False
        time.sleep(ASK_SECONDS)
    return True


def _signs(folder: Path, topic: str, name: str) -> list[Sign]:
    """Signs of the parts that have not said why they ended."""
    signs = (_read(path, {}) for path in sorted(folder.glob("part-*.json")))
    return [sign for sign in signs if sign and not sign["said"] and (not topic or sign["agreed"].get(topic) == name)]


def _read(path: Path, otherwise: Sign) -> Sign:
    try:
        return dict(read_json(path))
    except (OSError, ValueError):  # it is being written
        return otherwise
