"""The hidden directory in which finished tasks are kept until their run is complete, locked by the one that works."""

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.work.tasks import Counts, Done, Executor, Input, Settings, Task, Work
from lineage.digest import sha256_json
from lineage.errors import BadInput
from lineage.progress import Progress

FOLDER = ".work"
LOCK = "lock"


@dataclass(frozen=True)
class Finished:
    """All tasks of a stage; task `n` left its files in `path/n` with five digits."""

    path: Path
    digests: list[str]
    counts: list[Counts]

    @property
    def digest(self) -> str:
        """Digest of everything the stage wrote."""
        return sha256_json(self.digests)

    @property
    def input(self) -> Input:
        """The stage as what a later task reads."""
        return Input(self.path, self.digest)

    def task(self, number: int) -> Input:
        """One task's files as what a later task reads."""
        return Input(self.path / f"{number:05d}", self.digests[number])


Job = tuple[Settings, tuple[Input, ...]]


class Workspace:
    """Runs the tasks of a stage in `path/<stage>`."""

    def __init__(self, path: Path, executor: Executor) -> None:
        self.path, self._executor = path, executor

    def each(
        self, stage: str, work: Work, jobs: Iterable[Job], title: str, total: int, at_once: int | None = None
    ) -> Iterator[Done]:
        """The tasks in order as they finish, counted under `title`; `jobs` are their settings and inputs."""
        folder = self.path / stage
        tasks = (
            Task(work, settings, inputs, folder / f"{number:05d}") for number, (settings, inputs) in enumerate(jobs)
        )
        with Progress(title, total, "tasks", quiet=not title) as progress:
            for done in self._executor.run(tasks, at_once):
                progress.advance()
                yield done

    def all(self, stage: str, work: Work, jobs: list[Job], title: str = "", at_once: int | None = None) -> Finished:
        """The stage when every task of it is finished."""
        done = list(self.each(stage, work, jobs, title or stage, len(jobs), at_once))
        return Finished(self.path / stage, [each.digest for each in done], [each.counts for each in done])

    def one(self, stage: str, work: Work, settings: Settings, *inputs: Input) -> Finished:
        """A stage of a single task."""
        done = next(self.each(stage, work, [(settings, inputs)], "", 1))
        return Finished(self.path / stage, [done.digest], [done.counts])


@contextmanager
def locked(run: Path) -> Iterator[Path]:
    """The work directory of a run, for this process alone. Raises BadInput if another process has it."""
    work = run / FOLDER
    while True:
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(work / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(descriptor, work / LOCK):
                break
        except BlockingIOError:
            os.close(descriptor)
            raise BadInput(f"another process is at work in {run}: wait for it, or stop it") from None
        os.close(descriptor)
    try:
        for leftover in [*run.glob(".*.partial-*"), *work.glob("**/.*.partial-*"), *work.glob("**/.*.old-*")]:
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)
        yield work
    finally:
        os.close(descriptor)


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
