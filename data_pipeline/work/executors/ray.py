"""Runs tasks on a Ray cluster, whose nodes share the file system that holds the output and the
input."""

import logging
import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Self

from mlm_repro.data_pipeline.work.tasks import Done, WorkTask, run_task
from mlm_repro.lineage.errors import BadInput, Interrupted
from mlm_repro.lineage.extras import import_extra

RETRIES = 5
AHEAD = 4
ANSWER_SECONDS = 10


class RayExecutor:
    """Context manager whose method `run` runs tasks on a Ray cluster and yields the Done of each,
    in the order of the tasks. The cluster is the one that the environment variable `RAY_ADDRESS`
    names, whatever `workers` is. Without that variable it is the latest that Ray has recorded on
    this machine, or, if there is none, one started here with `workers` processes, 0 meaning one for
    each core.

    A task whose node or process is lost is run again elsewhere. Raises BadInput if Ray is not
    installed, or, when the block begins, if the cluster cannot be used.
    """

    def __init__(self, workers: int = 0) -> None:
        # Ray that is started here then listens to this machine alone, on any system.
        if "RAY_ADDRESS" not in os.environ:
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        self._ray: Any = import_extra("ray", "ray")
        self._workers = workers

    def __enter__(self) -> Self:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        address = os.environ.get("RAY_ADDRESS")
        if address:
            _check_answer(address)
        local_options: dict[str, Any] = (
            {}
            if address
            else {
                "num_cpus": self._workers or None,
                "include_dashboard": False,
            }
        )
        try:
            self._ray.init(
                address=address, logging_level=logging.ERROR, log_to_driver=False, **local_options
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise BadInput(
                f"the Ray cluster {address or 'of this machine'} cannot be used: {error}; name one"
                " that runs in RAY_ADDRESS, or leave --executor ray out"
            ) from error
        return self

    def __exit__(self, *error: object) -> None:
        self._ray.shutdown()

    def run(self, tasks: Iterable[WorkTask], at_once: int | None = None) -> Iterator[Done]:
        """Run the tasks on the cluster and yield the result of each, a Done, in order. At most
        `at_once` tasks are in work at a time, by default `AHEAD` for each CPU of the cluster; the
        next one begins when the caller asks for a further result. Raises Interrupted if the cluster
        fails or a task is lost more than RETRIES times, BadInput if the nodes do not share the
        output, and errors of the tasks. After an error, or if the caller stops early, the tasks in
        work are cancelled."""
        ray = self._ray
        # The digest goes with each task, so that a node with other code refuses it.
        remote = ray.remote(max_retries=RETRIES, num_cpus=1)(run_task)
        window = at_once or AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        iterator = iter(tasks)
        pending = deque(
            (task, remote.remote(task, task.digest)) for task in islice(iterator, window)
        )
        try:
            while pending:
                task, reference = pending.popleft()
                try:
                    done: Done = ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                except ray.exceptions.RayError as error:
                    raise Interrupted(
                        f"the Ray cluster did not finish task {task.output.name}, which it repeats"
                        f" if it is lost: {error}; the same command continues from what was"
                        " finished"
                    ) from error
                if not task.output.is_dir():
                    raise BadInput(
                        f"a Ray node wrote {task.output}, and this machine does not see it: name as"
                        " --runs or OUT a folder that all nodes share"
                    )
                yield done
                pending.extend(
                    (task, remote.remote(task, task.digest)) for task in islice(iterator, 1)
                )
        finally:
            for _, reference in pending:
                ray.cancel(reference, force=True)


def _check_answer(address: str) -> None:
    """Raise BadInput if nothing listens at `address`, `host:port` or `ray://host:port`; Ray itself
    would try for minutes. An address of another form is not checked."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), ANSWER_SECONDS).close()
        except OSError as error:
            raise BadInput(
                f"nothing answers at RAY_ADDRESS = {address}: {error}; start that cluster, correct"
                " the address, or unset it to work on this machine"
            ) from error
