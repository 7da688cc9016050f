"""Executors of tasks: processes of this machine, a Ray cluster, or the parts of an array of jobs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lineage.errors import BadInput

if TYPE_CHECKING:
    from data_pipeline.work.executors.local import LocalExecutor
    from data_pipeline.work.executors.ray import RayExecutor

NAMES = ("local", "ray")


def make_executor(name: str, workers: int, preload: Sequence[str] = ()) -> "LocalExecutor | RayExecutor":
    """The executor of that name; `workers` is the number of its processes, 0 for one on each core.

    Local processes are forked from one that has imported the modules of `preload`.
    """
    if name == "local":
        from data_pipeline.work.executors.local import LocalExecutor

        return LocalExecutor(workers, preload)
    if name == "ray":
        from data_pipeline.work.executors.ray import RayExecutor

        return RayExecutor(workers)
    raise BadInput(f"there is no executor {name!r}: choose from {' and '.join(NAMES)}")
