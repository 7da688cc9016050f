"""The tasks that a BERT is fine-tuned on: their published files, recipes and metrics. Imports no
torch.

Formats: MNLI and QQP as GLUE gives them (tab-separated, a header line), SQuAD's JSON (1.1 and 2.0),
RACE's folders of one JSON object a passage. A missing file raises DataMissing, an unreadable one
BadInput with the line. The recipes for MNLI and RACE come from Megatron-LM's example scripts (8
GPUs); QQP has MNLI's, and SQuAD the recipe of BERT's own code.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt

from mlm_repro.engine.config import NotNegative, Share
from mlm_repro.lineage.atomic import parse_json, read_bytes
from mlm_repro.lineage.config import Config
from mlm_repro.lineage.errors import BadInput, DataMissing, cause
from mlm_repro.lineage.files import Positive

MNLI_LABELS = ("contradiction", "entailment", "neutral")


@dataclass(frozen=True)
class LabelledExample:
    """Example with one right answer, either of two kinds: `pairs` has one pair of texts, and
    `label` is the number of its class; or `pairs` has a pair (question with option, passage) for
    each option, and `label` is the index of the right one."""

    pairs: tuple[tuple[str, str], ...]
    label: int


@dataclass(frozen=True)
class SpanExample:
    """Question about a context. The tuple `answers` has the texts of its answers, which are spans
    of the context, and the tuple `starts` the index of each answer's first character there, in the
    same order; both are empty if the context does not answer it."""

    question: str
    context: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]
    """Index in the context of each answer's first character, in the order of `answers`."""


TaskExample = LabelledExample | SpanExample


def read_mnli(path: Path) -> list[LabelledExample]:
    """Return a list of a LabelledExample for each row of a file of MNLI, in order: its pair of
    sentences, labelled by the index of its label in MNLI_LABELS. Rows with the gold label `-`, on
    which the annotators do not agree, are skipped.

    Raises DataMissing if there is no such file, BadInput if it is not readable, lacks a column, or
    has a row of another length or with another label.
    """
    examples = []
    for line, (first, second, label) in _rows(path, ("sentence1", "sentence2", "gold_label")):
        if label == "-":
            continue
        if label not in MNLI_LABELS:
            raise BadInput(
                f"{path} line {line}: gold_label is {label!r}, not one of {', '.join(MNLI_LABELS)}:"
                " correct it, or write - there to have the line skipped"
            )
        examples.append(LabelledExample(((first, second),), MNLI_LABELS.index(label)))
    return examples


def read_qqp(path: Path) -> list[LabelledExample]:
    """Return a list of a LabelledExample for each pair of questions in a file of QQP that is
    labelled 0 or 1 (duplicates), in order. Other rows are skipped; the published file has a few
    truncated ones. Raises DataMissing if there is no such file, BadInput if it is not readable or
    lacks a column."""
    rows = _rows(path, ("question1", "question2", "is_duplicate"), skip_short=True)
    return [
        LabelledExample(((a, b),), int(label)) for _, (a, b, label) in rows if label in ("0", "1")
    ]


def read_squad(path: Path) -> list[SpanExample]:
    """Return a list of a SpanExample for every question of a SQuAD 1.1 or 2.0 file, in order; one
    that the context does not answer has no answers. Raises DataMissing if there is no such file,
    BadInput if it is not readable or has another form."""
    examples = []
    try:
        for article in parse_json(_read(path))["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    answers = [] if question.get("is_impossible") else question["answers"]
                    texts = tuple(str(answer["text"]) for answer in answers)
                    starts = tuple(int(answer["answer_start"]) for answer in answers)
                    examples.append(
                        SpanExample(question["question"], paragraph["context"], texts, starts)
                    )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadInput(f"{path} is not a SQuAD file: {type(error).__name__} {error}") from error
    return examples


def read_race(folder: Path) -> list[LabelledExample]:
    """Return a list of a LabelledExample for every RACE question in the `.txt` files anywhere below
    a folder, such as `train/middle` or `train`, in the order of their paths: a (question with
    option, passage) pair for each option, and the index of the right one. Raises DataMissing if
    there is no such file, BadInput for a file that is not readable or a line that is not a
    passage."""
    files = sorted(folder.rglob("*.txt"))
    if not files:
        raise DataMissing(
            f"there are no .txt files below {folder}: --data must name the folder that has"
            " RACE's folders `train` and `test`"
        )
    examples = []
    for path in files:
        for line, text in enumerate(_read(path).splitlines(), 1):
            try:
                passage = parse_json(text)
                rows = zip(
                    passage["questions"], passage["options"], passage["answers"], strict=True
                )
                for question, options, answer in rows:
                    pairs = tuple(
                        (_fill(question, option), passage["article"]) for option in options
                    )
                    examples.append(LabelledExample(pairs, "ABCD".index(answer)))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise BadInput(
                    f"{path} line {line} is not a RACE passage, a JSON object with article,"
                    f" questions, options and answers: {error}"
                ) from error
    return examples


def _fill(question: str, option: str) -> str:
    """Return a text: the question with the option in place of every `_`, or, if the question has no
    `_`, with a space and the option after it (Megatron-LM tasks/race/data.py)."""
    return question.replace("_", option) if "_" in question else f"{question} {option}"


def _rows(
    path: Path, columns: tuple[str, ...], skip_short: bool = False
) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, cells of the named columns in the order given) for each row below the
    header of a tab-separated file; the header is line 1. Empty lines are skipped; cells are
    stripped of white space.

    Raises DataMissing if there is no such file. Raises BadInput if the file is not readable, if a
    column is missing, or if a row has not as many cells as the header; `skip_short` skips such a
    row instead.
    """
    lines = _read(path).split("\n")
    header = lines[0].rstrip("\r").split("\t")
    if missing := [column for column in columns if column not in header]:
        raise BadInput(
            f"the first line of {path} names no column {missing[0]!r}: it must be the header of the"
            " published file, separated by tabs"
        )
    indices = [header.index(column) for column in columns]
    for number, line in enumerate(lines[1:], 2):
        cells = line.rstrip("\r").split("\t")
        if line and len(cells) == len(header):
            yield number, [cells[index].strip() for index in indices]
        elif line and not skip_short:
            raise BadInput(
                f"{path} line {number} has {len(cells)} cells separated by tabs, and the header has"
                f" {len(header)}: put the published file back"
            )


def _read(path: Path) -> str:
    """Return a file's whole text. Raises DataMissing if there is no such file, BadInput if it
    cannot be read or is not UTF-8."""
    try:
        return read_bytes(path).decode("utf-8")
    except FileNotFoundError as error:
        raise DataMissing(
            f"there is no file {path}: --data must name the folder of the task's published files"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"{path} cannot be read: {cause(error)}; put the published file of the fine-tuning"
            " task there again"
        ) from error


class FineTuneRecipe(Config):
    """Settings of a fine-tuning with AdamW: epochs, batch size, learning rate, weight decay and
    seed. The learning rate rises linearly to its peak in the first `warmup_share` of the steps,
    then falls linearly, to reach 0 one step after the last."""

    epochs: PositiveInt
    batch_size: PositiveInt
    """Examples per step."""
    learning_rate: Positive
    """The peak learning rate."""
    warmup_share: Share = 0.065
    """Share of the steps, from the first on, in which the learning rate rises to its peak."""
    weight_decay: NotNegative = 0.1
    seed: NonNegativeInt = 1234
    """Seed of the examples' order, dropout and the new layer."""


@dataclass(frozen=True)
class FineTuneTask:
    """A fine-tuning task: `outputs`, the output width of the new head; `read`, the function that
    reads a file or a folder of examples; `train`, the training file or folder, and `held_out`, a
    dict name of each evaluation set → the set's file or folder, all as paths below the data folder;
    and `recipe`, the published one."""

    outputs: int
    """Output width of the new head: the number of scores for a pair of texts, an option or a
    position."""
    read: Callable[[Path], Sequence[TaskExample]]
    train: str
    held_out: Mapping[str, str]
    """Dict name of each evaluation set → its file or folder, a path below the data folder."""
    recipe: FineTuneRecipe


MNLI_SETS = {"matched": "dev_matched.tsv", "mismatched": "dev_mismatched.tsv"}
RACE_SETS = {"middle": "test/middle", "high": "test/high"}
PAIRS = FineTuneRecipe(epochs=5, batch_size=64, learning_rate=5e-5)
SQUAD = FineTuneRecipe(epochs=2, batch_size=32, learning_rate=3e-5)
RACE = FineTuneRecipe(epochs=3, batch_size=32, learning_rate=1e-5)
TASKS = {
    "mnli": FineTuneTask(3, read_mnli, "train.tsv", MNLI_SETS, PAIRS),
    "qqp": FineTuneTask(2, read_qqp, "train.tsv", {"dev": "dev.tsv"}, PAIRS),
    "squad": FineTuneTask(2, read_squad, "train-v1.1.json", {"dev": "dev-v1.1.json"}, SQUAD),
    "squad2": FineTuneTask(2, read_squad, "train-v2.0.json", {"dev": "dev-v2.0.json"}, SQUAD),
    "race": FineTuneTask(1, read_race, "train", RACE_SETS, RACE),
}


def find_task(name: str) -> FineTuneTask:
    """Return the FineTuneTask called `name`, such as `mnli`. Raises BadInput if there is no such
    task."""
    if name not in TASKS:
        raise BadInput(f"there is no fine-tuning task {name!r}; there are {', '.join(TASKS)}")
    return TASKS[name]


def read_sets(name: str, data: Path) -> dict[str, Sequence[TaskExample]]:
    """Return a dict name of a set → sequence of its examples, from the published files of the task
    `name` below the folder `data`: first the evaluation sets, then `train`.

    Raises DataMissing if a file is missing, BadInput if one is not readable, has another form or
    has no example, or for an unknown task.
    """
    task = find_task(name)
    sets = {
        split: task.read(data / file)
        for split, file in {**task.held_out, "train": task.train}.items()
    }
    for split, examples in sets.items():
        if not examples:
            raise BadInput(
                f"{data}: the {split} set of {name} has no example: --data must name the folder of"
                " the task's published files"
            )
    return sets


def squad_scores(predicted: Sequence[str], expected: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the dict of `exact_match` and `f1` in percent. `predicted` has an answer for each
    question, at least one, and `expected` the question's right answers, of which the best match
    counts. Both scores are means over questions.

    For a question without an answer, the empty answer is right (SQuAD 2.0, `evaluate-v2.0.py`; for
    answered questions `evaluate-v1.1.py` has the same rules).
    """
    known = [[answer for answer in answers if normalize(answer)] or [""] for answers in expected]
    pairs = list(zip(predicted, known, strict=True))
    exact = sum(
        any(normalize(text) == normalize(answer) for answer in answers) for text, answers in pairs
    )
    overlap = sum(max(token_f1(text, answer) for answer in answers) for text, answers in pairs)
    return {"exact_match": 100 * exact / len(pairs), "f1": 100 * overlap / len(pairs)}


def normalize(text: str) -> str:
    """Return an answer's text as SQuAD compares answers: in lower case, without ASCII punctuation
    and the articles a, an and the, and with single spaces between words."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(predicted: str, expected: str) -> float:
    """Return the F1 of a predicted answer: the harmonic mean, from 0 to 1, of its precision and
    recall in words of the normalized texts. If either text has no words, both must be empty to
    score 1."""
    predicted_words = normalize(predicted).split()
    expected_words = normalize(expected).split()
    if not predicted_words or not expected_words:
        return float(predicted_words == expected_words)
    common = sum((Counter(predicted_words) & Counter(expected_words)).values())
    return 2 * common / (len(predicted_words) + len(expected_words))
