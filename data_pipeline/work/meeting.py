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
from mlm_repro.lineage.atomic import NO_LINKS, read_json, write_json
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
        self._place = folder / f"part-{part}-{os.urandom(8).hex()}.json"
        self._sign: Sign = {"count": 0, "agreed": {}, "said": ""}
        self._ended, self._thread = threading.Event(), threading.Thread(target=self._beat, daemon=True)
        self._writing = threading.Lock()

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._before = read_signs(self._folder)
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._ended.set()
        self._thread.join()
        if error is not None and self._sign["agreed"]:
            self._sign["said"] = str(error) or "it was interrupted"
            self._write()
            return
        is_done = error is None and self.part == 1
        with suppress(OSError):  # others are there
            for path in self._folder.iterdir() if is_done else [self._place]:
                path.unlink(missing_ok=True)
            self._folder.rmdir()
            self._folder.parent.rmdir()

    def agree(self, topic: str, facts: Mapping[str, str]) -> None:
        """Agree with the other parts. Raises BadInput, with what differs, if a living part agreed on other facts."""
        agreed = self._sign["agreed"]
        while True:
            made = sorted(self._folder.glob(f"agreed-{topic}-*.json"))
            try:
                last = read_json(made[-1]) if made else {}
            except (OSError, ValueError):  # the first part has ended and removed it
                continue
            is_same = last.get("facts") == facts
            if made and not is_same and is_alive(self._folder, topic, made[-1].name):
                raise BadInput(
                    f"part {self.part} of {self.parts} differs from part {last['part']}, which is at work, in "
                    f"{'; '.join(differences(last['facts'], facts))}: parts need one recipe, input, code and Python"
                )
            place = made[-1] if is_same else self._folder / f"agreed-{topic}-{len(made):06d}.json"
            self._sign["agreed"] = agreed | {topic: place.name}
            self._write()  # before it is there, so that it is held from its beginning on
            if is_same or self._make(place, {"part": self.part, "facts": facts}):
                return
            self._sign["agreed"] = agreed

    def _make(self, place: Path, agreement: dict[str, Any]) -> bool:
        """Make an agreement, unless another part has; processes of two machines may have one number."""
        own = self._place.with_name(f"{self._place.stem}.own")
        write_json(own, agreement)
        try:
            os.link(own, place)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            raise BadInput(f"the parts of an array cannot meet in {place.parent}: it has no links") from error
        finally:
            own.unlink()
        return True

    def wait_for(self, ready: Callable[[], T | None], part: int, state: Callable[[], str]) -> T:
        """The first result of `ready` that is not None, which another part makes; `state` says how far that is.

        Raises Interrupted when that part ends without it, or gives no sign of life for MLM_JOIN_SECONDS.
        """
        began = heard = time.monotonic()
        told, signs = SAID_AFTER_SECONDS, read_signs(self._folder, part)
        while (value := ready()) is None:
            before, signs, now = signs, read_signs(self._folder, part), time.monotonic()
            heard = now if signs != before else heard
            said = {name: sign["said"] for name, sign in signs.items() if sign["said"]}
            if new := [words for name, words in said.items() if signs[name] != self._before.get(name)]:
                raise Interrupted(f"part {part} has ended: {new[0]}; give the commands of all parts again")
            if now - heard > self._limit:
                words = f"; before that it said: {[*said.values()][-1]}" if said else ""
                raise Interrupted(
                    f"part {part} of {self.parts} gave no sign of life for {self._limit} seconds ({JOIN_SECONDS}), and "
                    f"{state()}: give its command again, and those of all parts that ended{words}"
                )
            if now - began > told and not is_quiet():
                print(f"waiting for part {part} of {self.parts}: {state()}", file=sys.stderr, flush=True)
                told *= 4
            time.sleep(ASK_SECONDS)
        return value

    def _beat(self) -> None:
        while True:
            self._sign["count"] += 1
            self._write()
            if self._ended.wait(BEAT_SECONDS):
                return

    def _write(self) -> None:
        with self._writing, suppress(OSError):  # the first part has ended and removed the folder
            self._place.write_text(json.dumps(self._sign), encoding="utf-8")


def is_alive(folder: Path, topic: str = "", name: str = "") -> bool:
    """True if a sign of a meeting, of those that agreed to `name`, changes while it is looked at."""
    until, before = time.monotonic() + LOOK_SECONDS, read_signs(folder)
    while folder.exists() and time.monotonic() < until:
        for path, sign in read_signs(folder).items():
            if before.get(path) != sign and not sign["said"] and (not topic or sign["agreed"].get(topic) == name):
                return True
        time.sleep(ASK_SECONDS)
    return False


def read_signs(folder: Path, part: int | str = "*") -> dict[str, Sign]:
    """Signs of a part, or of all, by the names of their files; one that is being written is not there."""
    signs = {}
    for path in folder.glob(f"part-{part}-*.json"):
        with suppress(OSError, ValueError):
            signs[path.name] = dict(read_json(path))
    return signs
