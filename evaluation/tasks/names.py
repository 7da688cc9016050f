"""The protocols by name: title, test file and the function that builds the task. Imports nothing slow."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from mlm_repro.evaluation.windows import shortened
from mlm_repro.lineage.errors import BadInput, DataMissing, did_you_mean

if TYPE_CHECKING:
    from mlm_repro.evaluation.checkpoints import EvaluatedCheckpoint
    from mlm_repro.evaluation.protocol import Task


class NamedProtocol(NamedTuple):
    """A protocol of the table."""

    title: str
    test_set: str
    """Name of the test file in `mlm_repro.data_pipeline.contamination.testsets.TEST_SETS`."""
    function: str
    """`module:function` of (protocol's name, test file, tokenizer, context of the model) → task."""
    stand_in: str = ""
    """`module:function` of (dataset directory, tokenizer, context, reason) → task, for a machine without the file."""


TASKS = {
    "wikitext103": NamedProtocol(
        "Megatron-LM's recipe, the published one: 24 detokenizer rules, stride 32, per space-separated token",
        "wikitext103", "mlm_repro.evaluation.tasks.wikitext103:sliding_wikitext103",
        "mlm_repro.evaluation.tasks.heldout:heldout_perplexity",
    ),
    "wikitext103-stride512": NamedProtocol(
        "the same in windows that overlap by half", "wikitext103",
        "mlm_repro.evaluation.tasks.wikitext103:stride512_wikitext103",
    ),
    "wikitext103-stride1024": NamedProtocol(
        "the same in disjoint windows", "wikitext103", "mlm_repro.evaluation.tasks.wikitext103:stride1024_wikitext103"
    ),
    "wikitext103-raw": NamedProtocol(
        "stride 32 without a detokenizer", "wikitext103", "mlm_repro.evaluation.tasks.wikitext103:raw_wikitext103"
    ),
    "wikitext103-lm-eval": NamedProtocol(
        "as lm-evaluation-harness's wikitext: 62 documents, disjoint windows, its word count; a first token once",
        "wikitext103", "mlm_repro.evaluation.tasks.wikitext103:lm_eval_wikitext103",
    ),
    "wikitext103-lm-eval-bos-twice": NamedProtocol(
        "the same as releases up to 0.4.13 print it, which score a tokenizer's first token after another",
        "wikitext103", "mlm_repro.evaluation.tasks.wikitext103:lm_eval_twice_wikitext103",
    ),
    "wikitext103-memory": NamedProtocol(
        "Transformer-XL's: no detokenizer, disjoint segments, each with the memory of those before",
        "wikitext103", "mlm_repro.evaluation.tasks.wikitext103:memory_wikitext103",
    ),
    "wikitext103-huggingface": NamedProtocol(
        "transformers' strided recipe: rows joined by blank lines, overlap by half, per sub-word",
        "wikitext103", "mlm_repro.evaluation.tasks.wikitext103:huggingface_wikitext103",
    ),
    "lambada": NamedProtocol(
        "Megatron's --strict-lambada, the published one: OpenAI's text, every sub-word of the last word",
        "lambada", "mlm_repro.evaluation.tasks.lambada:openai_lambada",
        "mlm_repro.evaluation.tasks.heldout:heldout_cloze",
    ),
    "lambada-lm-eval": NamedProtocol(
        "as lm-evaluation-harness's lambada_openai: what follows the last space",
        "lambada", "mlm_repro.evaluation.tasks.lambada:lm_eval_lambada",
    ),
    "lambada-last-token": NamedProtocol(
        "Megatron without --strict-lambada: the last sub-word only", "lambada",
        "mlm_repro.evaluation.tasks.lambada:last_token_lambada",
    ),
    "lambada-stopword-filter": NamedProtocol(
        "the strict rule where no stop word counts as an answer", "lambada",
        "mlm_repro.evaluation.tasks.lambada:stop_word_lambada",
    ),
    "lambada-standard": NamedProtocol(
        "the strict rule on the original lower-cased plain text",
        "lambada-standard", "mlm_repro.evaluation.tasks.lambada:standard_lambada",
    ),
}  # fmt: skip


def check_task_name(name: str) -> None:
    """Raise BadInput, with the nearest known name, for a protocol that does not exist."""
    if name not in TASKS:
        raise BadInput(f"unknown protocol {name!r}; {did_you_mean(name, TASKS, '`mlm-eval list` names them')}")


def build_task(name: str, evaluated: "EvaluatedCheckpoint", window: int | None = None) -> "Task":
    """The task of a protocol for a checkpoint, or its stand-in if the test file is missing.

    A window stands for the model's context, and the task's name says so. Raises DataMissing if the dataset that the
    checkpoint was trained on is not here either.
    """
    from mlm_repro.data_pipeline.contamination.testsets import find_test_set

    protocol, arguments = TASKS[name], (evaluated.tokenizer, shortened(evaluated.model.seq_length, window))
    named = f"{name}-window{window}" if window else name
    try:
        path = find_test_set(protocol.test_set)
    except DataMissing as missing:
        if not protocol.stand_in:
            raise
        try:
            directory = evaluated.training_dataset()
        except DataMissing as also_missing:
            raise DataMissing(f"{missing}; and no held-out documents stand in, as {also_missing}") from also_missing
        return made_by(protocol.stand_in, directory, *arguments, str(missing))
    return made_by(protocol.function, named, path, *arguments)


def made_by(function: str, *arguments: Any) -> "Task":
    """The task that a function `module:function` makes."""
    module, _, name = function.partition(":")
    task: Task = getattr(import_module(module), name)(*arguments)
    return task
