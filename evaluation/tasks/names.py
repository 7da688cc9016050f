"""The protocols by name: title, test file and the function that builds the task. Imports nothing
slow."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlm_repro.lineage.config import read_toml
from mlm_repro.lineage.errors import BadInput, DataMissing, did_you_mean

if TYPE_CHECKING:
    from mlm_repro.evaluation.checkpoints import EvaluatedCheckpoint
    from mlm_repro.evaluation.protocol import Task


class NamedProtocol(NamedTuple):
    """Entry of protocols.toml: a protocol's title, the name of its test file, and the function that
    builds its task, with its settings. It may have a usual longest window, and a function that
    builds a stand-in task from a dataset's directory on a machine without the test file."""

    title: str
    test_set: str
    """Name of the test file in `mlm_repro.data_pipeline.contamination.testsets.TEST_SETS`."""
    function: str
    """`module:function` in this folder: (task's name, path of the test file, tokenizer, longest
    input) and, by name, `settings` → task."""
    settings: dict[str, Any] = {}  # noqa: RUF012
    """Further arguments, by name, of the function that builds the task."""
    usual_window: int | None = None
    """Longest window, in tokens, unless another is requested; None for the model's context."""
    stand_in: str = ""
    """`module:function` in this folder for a machine without the test file: (dataset directory,
    tokenizer, context, reason) → task. Empty if nothing stands in."""

    def task(self, *arguments: Any) -> "Task":
        """Call the function that builds this protocol's task, and return the task. `arguments` are
        the task's name, the path of the test file, the tokenizer and the longest input; the
        protocol's settings go with them."""
        return _made_by(self.function, *arguments, **self.settings)


TASKS = {
    name: NamedProtocol(**row)
    for name, row in read_toml(Path(__file__).with_name("protocols.toml")).items()
}


def check_task_name(name: str) -> None:
    """Raise BadInput, with the nearest known name, for a protocol that does not exist."""
    if name not in TASKS:
        raise BadInput(
            f"unknown protocol {name!r}; {did_you_mean(name, TASKS, '`mlm-eval list` names them')}"
        )


def build_task(
    name: str, evaluated: "EvaluatedCheckpoint", window: int | None = None, path: Path | None = None
) -> "Task":
    """Return the Task of the protocol `name`, a key of TASKS, for a checkpoint, on the test file at
    `path` or else the published one, which is downloaded if this machine lacks it. If it cannot be
    found or downloaded, return the task that stands in for the protocol, under another name.

    `window` is the longest input in tokens, by default the smaller of the context and the
    protocol's usual window, if it has one; a requested `window` is in the name of the protocol's
    task, not of one that stands in. Raises DataMissing if nothing stands in for a missing file, or
    if the dataset that the checkpoint was trained on is missing too, and the errors of the function
    that builds the task.
    """
    from mlm_repro.data_pipeline.contamination.testsets import find_test_set

    protocol = TASKS[name]
    context = evaluated.model.seq_length
    arguments = evaluated.tokenizer, window or min(context, protocol.usual_window or context)
    named = f"{name}-window{window}" if window else name
    try:
        path = path or find_test_set(protocol.test_set)
    except DataMissing as missing:
        if not protocol.stand_in:
            raise
        try:
            directory = evaluated.training_dataset()
        except DataMissing as also_missing:
            raise DataMissing(
                f"{missing}; and no held-out documents stand in, as {also_missing}"
            ) from also_missing
        return _made_by(protocol.stand_in, directory, *arguments, str(missing))
    return protocol.task(named, path, *arguments)


def _made_by(function: str, *arguments: Any, **settings: Any) -> "Task":
    """Import the module and call the function that `function`, a text `module:function`, names in
    the package `mlm_repro.evaluation.tasks`, with the other arguments and settings. Return the Task
    that it builds."""
    module, _, name = function.partition(":")
    task: Task = getattr(import_module(f"mlm_repro.evaluation.tasks.{module}"), name)(
        *arguments, **settings
    )
    return task
