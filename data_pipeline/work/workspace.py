"""The hidden directory in which finished tasks are kept until their run is complete."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mlm_repro.data_pipeline.work.executors.local import LocalExecutor
from mlm_repro.data_pipeline.work.executors.part import PartExecutor
from mlm_repro.data_pipeline.work.executors.ray import RayExecutor
from mlm_repro.data_pipeline.work.tasks import Counts, Done, Input, Settings, Work, WorkTask
from mlm_repro.lineage.digest import sha256_json
from mlm_repro.lineage.progress import Progress

FOLDER = ".work"
Executor = LocalExecutor | RayExecutor | PartExecutor


@dataclass(frozen=True)
class Finished:
    """The finished tasks of a stage: the stage's directory, and the digest and the counts of each
    task, in order; task `n`, from 0, left its files in `path/n`, written with five digits."""

    path: Path
    digests: list[str]
    counts: list[Counts]

    @property
    def digest(self) -> str:
        """Digest of all files that the tasks of the stage wrote, made of the tasks' recorded
        digests; no file is read."""
        return sha256_json(self.digests)

    @property
    def input(self) -> Input:
        """The stage's directory, with the files of all its tasks, as an Input of a later task."""
        return Input(self.path, self.digest)

    def task(self, number: int) -> Input:
        """Return the directory of the stage's task with this number, from 0, as an Input of a later
        task."""
        return Input(self.path / f"{number:05d}", self.digests[number])


Job = tuple[Settings, tuple[Input, ...]]


class Workspace:
    """A directory in which the tasks of a build run, stage by stage, on an executor, by the methods
    `each`, `all` and `one`. Task number N, from 0, writes to the folder `STAGE/N` below the
    attribute `path`, N with five digits; a task that is finished there is not done again."""

    def __init__(self, path: Path, executor: Executor) -> None:
        self.path = path
        self.executor = executor

    def each(
        self,
        stage: str,
        work: Work,
        jobs: Iterable[Job],
        title: str,
        total: int,
        at_once: int | None = None,
    ) -> Iterator[Done]:
        """Run one task, a call of `work`, for each of the `jobs`, a pair of settings and inputs,
        and yield the result of each, a Done, in order. Task number N, from 0, has the directory
        `stage`/N in the workspace's `path`, with N in five digits, and one that is finished there
        is not done again. Tasks are begun only as the results are read.

        The executor has at most `at_once` tasks in work at a time, by default its own number.
        Progress of `total` tasks is shown under `title` on standard error; an empty title shows
        none. Raises the errors of the tasks and of the executor, such as Interrupted if it loses
        tasks.
        """
        folder = self.path / stage
        tasks = (
            WorkTask(work, settings, inputs, folder / f"{number:05d}")
            for number, (settings, inputs) in enumerate(jobs)
        )
        with Progress(title, total, "tasks", quiet=not title) as progress:
            for done in self.executor.run(tasks, at_once):
                progress.advance()
                yield done

    def all(
        self,
        stage: str,
        work: Work,
        jobs: list[Job],
        title: str | None = None,
        at_once: int | None = None,
    ) -> Finished:
        """Run `work` for each of the `jobs`, a pair of settings and inputs, as a task of the stage
        called `stage`, wait for all, and return a Finished with the digests and counts of the
        tasks, in order; tasks that are finished already are not done again. The executor has at
        most `at_once` tasks in work at a time, by default its own number. Progress is shown under
        `title`, or the stage's name if it is None; an empty `title` shows none. Raises the errors
        of the method `each`."""
        done = list(
            self.each(stage, work, jobs, stage if title is None else title, len(jobs), at_once)
        )
        return Finished(
            self.path / stage,
            [result.digest for result in done],
            [result.counts for result in done],
        )

    def one(self, stage: str, work: Work, settings: Settings, *inputs: Input) -> Finished:
        """Run a stage of a single task, a call of `work`, without showing progress, and return a
        Finished, whose path has the task's files below `00000`. A task that is finished already is
        not done again."""
        return self.all(stage, work, [(settings, inputs)], "")
