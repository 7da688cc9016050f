"""The table of tasks that a BERT is fine-tuned on: files, kind of answer, hyper-parameters. Imports no torch.

The hyper-parameters are those of Megatron-LM's example scripts for MNLI and RACE (8 GPUs), MNLI's for QQP, and those of
BERT's own code for SQuAD; the command can be given others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.finetune.examples import Example, read_mnli, read_qqp, read_race, read_squad
from lineage.errors import BadInput


@dataclass(frozen=True)
class FineTuneTask:
    """A task, its files below the data folder, and a recipe."""

    title: str
    outputs: int
    """Numbers that the new head gives: of the pair, of each option, or of each position."""
    read: Callable[[Path], Sequence[Example]]
    train: str
    held_out: Mapping[str, str]
    """File or folder of each set that is evaluated."""
    epochs: int
    batch_size: int
    learning_rate: float


TASKS: dict[str, FineTuneTask] = {
    "mnli": FineTuneTask(
        "MNLI: does the second sentence follow from the first, contradict it, or neither; accuracy", 3,
        read_mnli, "train.tsv", {"matched": "dev_matched.tsv", "mismatched": "dev_mismatched.tsv"}, 5, 64, 5e-5,
    ),
    "qqp": FineTuneTask(
        "QQP: do two questions ask the same; accuracy", 2, read_qqp, "train.tsv", {"dev": "dev.tsv"}, 5, 64, 5e-5
    ),
    "squad": FineTuneTask(
        "SQuAD 1.1: the words of a context that answer a question; exact match and F1", 2,
        read_squad, "train-v1.1.json", {"dev": "dev-v1.1.json"}, 2, 32, 3e-5,
    ),
    "squad2": FineTuneTask(
        "SQuAD 2.0: the same, where some questions have no answer", 2,
        read_squad, "train-v2.0.json", {"dev": "dev-v2.0.json"}, 2, 32, 3e-5,
    ),
    "race": FineTuneTask(
        "RACE: the right one of four options for a question about a passage; accuracy", 1,
        read_race, "train", {"middle": "test/middle", "high": "test/high"}, 3, 32, 1e-5,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class FineTuned:
    """What came of a fine-tuning."""

    task: str
    checkpoint: str
    checkpoint_digest: str
    recipe: dict[str, Any]
    examples: dict[str, int]
    """Of each set."""
    metrics: dict[str, dict[str, float]]
    """Of each held-out set, in percent."""
    seconds: float


def find_task(name: str) -> FineTuneTask:
    """The task of that name. Raises BadInput for any other."""
    if name not in TASKS:
        raise BadInput(f"there is no task {name!r}; there are {', '.join(TASKS)}")
    return TASKS[name]
