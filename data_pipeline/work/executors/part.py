"""One part of an array of jobs: the same command on several machines that share the folder of the run."""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from mlm_repro.data_pipeline.work.executors.local import LocalExecutor
from mlm_repro.data_pipeline.work.executors.ray import RayExecutor
from mlm_repro.data_pipeline.work.tasks import Done, WorkTask, finished
from mlm_repro.lineage.errors import BadInput, Interrupted

WAIT_SECONDS = 0.5
T = TypeVar("T")


class PartExecutor:
    """Gives `workers` every `parts`-th task of a stage, beginning with number `part` from 1, and waits for the others.

    In the workspace, `part-N` is empty while part N works, and says why it ended too early.
    """

    def __init__(self, workers: LocalExecutor | RayExecutor, part: int, parts: int, workspace: Path) -> None:
        self.workers, self.part, self._parts = workers, part, parts
        self._sign = workspace / f"part-{part}"

    def __enter__(self) -> Self:
        self._sign.write_text("", encoding="utf-8")
        self.workers.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.workers.__exit__(kind, error, trace)
        if error and self._sign.exists():
            self._sign.write_text(str(error) or type(error).__name__, encoding="utf-8")

    def run(self, tasks: Iterable[WorkTask], at_once: int | None = None) -> Iterator[Done]:
        """The tasks' results in order. Raises Interrupted when another part has ended without its tasks."""
        every = list(tasks)
        own = dict(enumerate(self.workers.run(every[self.part - 1 :: self._parts], at_once)))
        for number, task in enumerate(every):
            place, turn = divmod(number, self._parts)
            yield own[place] if turn == self.part - 1 else self.wait_for(partial(finished, task, is_new=True))

    def wait_for(self, ready: Callable[[], T | None]) -> T:
        """The first result of `ready` that is not None. Raises Interrupted when another part has ended before."""
        while (value := ready()) is None:
            if not self._sign.exists():
                raise Interrupted("part 1 has ended, and says why: give all commands again")
            for sign in self._sign.parent.glob("part-*"):
                if sign.stat().st_mtime > self._sign.stat().st_mtime and (said := sign.read_text(encoding="utf-8")):
                    raise Interrupted(f"{sign.name} has ended: {said}; give the commands of all parts again")
            time.sleep(WAIT_SECONDS)
        return value


def parse_part(text: str) -> tuple[int, int]:
    """Number of the part and of all parts. Raises BadInput unless the text is such as 2/8."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise BadInput(f"--part {text}: write the number of the part, from 1, and of all parts, such as 2/8")
    return int(part), int(parts)
