"""One part of an array of jobs: the same command on several machines that share the folder of the run."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Self

from mlm_repro.data_pipeline.work.executors.local import LocalExecutor
from mlm_repro.data_pipeline.work.executors.ray import RayExecutor
from mlm_repro.data_pipeline.work.meeting import Meeting
from mlm_repro.data_pipeline.work.tasks import Done, WorkTask, finished
from mlm_repro.lineage.errors import BadInput


class PartExecutor:
    """Gives `workers` every task of a stage whose turn is that of this part of the `meeting`, and awaits the others."""

    def __init__(self, workers: LocalExecutor | RayExecutor, meeting: Meeting) -> None:
        self.workers, self.meeting = workers, meeting

    def __enter__(self) -> Self:
        self.workers.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.workers.__exit__(*error)

    def run(self, tasks: Iterable[WorkTask], at_once: int | None = None) -> Iterator[Done]:
        """The tasks' results in order. Raises Interrupted when another part ends without its tasks."""
        every, part, parts = list(tasks), self.meeting.part, self.meeting.parts
        own = dict(enumerate(self.workers.run(every[part - 1 :: parts], at_once)))
        for number, task in enumerate(every):
            place, turn = divmod(number, parts)
            if turn == part - 1:
                yield own[place]
            else:
                yield self.meeting.wait_for(partial(finished, task, is_new=True), turn + 1, partial(_state, every))


def _state(tasks: list[WorkTask]) -> str:
    done = sum(finished(task, is_new=True) is not None for task in tasks)
    return f"{done} of {len(tasks)} tasks of {tasks[0].output.parent.name} are done"


def parse_part(text: str) -> tuple[int, int]:
    """Number of the part and of all parts. Raises BadInput unless the text is such as 2/8."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise BadInput(f"--part {text}: write the number of the part, from 1, and of all parts, such as 2/8")
    return int(part), int(parts)
