"""Runs one part of an array of jobs: the same command on several machines that share the folder of
the run."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from mlm_repro.data_pipeline.work.executors.local import LocalExecutor
from mlm_repro.data_pipeline.work.executors.ray import RayExecutor
from mlm_repro.data_pipeline.work.meeting import Meeting
from mlm_repro.data_pipeline.work.tasks import Done, WorkTask, finished
from mlm_repro.lineage.errors import BadInput, Interrupted


class PartExecutor:
    """Executor of one part of a build on several machines that share a folder. Its method `run`
    does this part's share of a stage's tasks on the executor `workers`, waits until the other parts
    have done theirs, and yields the Done of every task in order. The `with` blocks of `workers` and
    of `meeting`, which has this part's number and the number of parts, must be open while `run`
    runs.

    `is_over` is a function that returns True once the first part has written the dataset and
    removed the tasks' files; `run` raises Interrupted if that happens while it waits.
    """

    def __init__(
        self, workers: LocalExecutor | RayExecutor, meeting: Meeting, is_over: Callable[[], bool]
    ) -> None:
        self.workers = workers
        self.meeting = meeting
        self.is_over = is_over

    def run(self, tasks: Iterable[WorkTask], at_once: int | None = None) -> Iterator[Done]:
        """Run this part's share of `tasks`, at most `at_once` at a time, wait until the other parts
        have done theirs, and yield the Done of every task in order. Raises Interrupted if another
        part ends before its tasks are done or gives no sign of life, or if the dataset is already
        written; BadInput if another part works on other facts; and the errors of this part's
        tasks."""
        all_tasks = list(tasks)
        part = self.meeting.part
        parts = self.meeting.parts
        # All own tasks are done before any waiting, because other parts may wait for them.
        own_results = dict(enumerate(self.workers.run(all_tasks[part - 1 :: parts], at_once)))
        for number, task in enumerate(all_tasks):
            index, turn = divmod(number, parts)
            if turn == part - 1:
                yield own_results[index]
            else:
                yield self.meeting.wait_for(
                    partial(self._made, task), turn + 1, partial(_state, all_tasks)
                )

    def _made(self, task: WorkTask) -> Done | None:
        done = finished(task, is_new=True)
        # The first part removes the tasks with the work: a part that did not look in time once
        # waited for them until it gave up.
        if done is None and self.is_over():
            raise Interrupted(
                "the dataset was written by the other parts while this part waited for them:"
                " nothing is left to do"
            )
        return done


def _state(tasks: list[WorkTask]) -> str:
    done = sum(finished(task, is_new=True) is not None for task in tasks)
    return f"{done} of {len(tasks)} tasks of {tasks[0].output.parent.name} are done"


def parse_part(text: str) -> tuple[int, int]:
    """Return the number of the part and the number of all parts that a text `I/N`, such as 2/8,
    gives. Raises BadInput if it is not of this form, or if the part is not from 1 to N."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise BadInput(
            f"--part {text} is not I/N with I from 1 to N: write the number of the part and of"
            " all parts, such as 2/8"
        )
    return int(part), int(parts)
