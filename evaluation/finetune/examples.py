"""The published files of MNLI, QQP, SQuAD and RACE as examples. Imports no torch.

Formats: MNLI and QQP as GLUE gives them (tab-separated, a header line), SQuAD's JSON (1.1 and 2.0), RACE's folders of
one JSON object a passage. A file that is not there raises DataMissing, one that cannot be read BadInput with the line.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lineage.atomic import parse_json, read_bytes
from lineage.errors import BadInput, DataMissing

MNLI_LABELS = ("contradiction", "entailment", "neutral")


@dataclass(frozen=True)
class LabelledExample:
    """Two texts of a class; or, for each option, the question with it and the passage, one of which is right."""

    pairs: tuple[tuple[str, str], ...]
    label: int


@dataclass(frozen=True)
class SpanExample:
    """A question whose answer is a part of the context; without answers it cannot be told from it."""

    question: str
    context: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]
    """Character at which each answer begins."""


Example = LabelledExample | SpanExample


def read_mnli(path: Path) -> list[LabelledExample]:
    """Rows with a gold label; those marked `-`, on which annotators did not agree, are left out."""
    examples = []
    for line, (first, second, label) in _rows(path, ("sentence1", "sentence2", "gold_label")):
        if label == "-":
            continue
        if label not in MNLI_LABELS:
            raise BadInput(f"{path} line {line}: {label!r} is none of {', '.join(MNLI_LABELS)}")
        examples.append(LabelledExample(((first, second),), MNLI_LABELS.index(label)))
    return examples


def read_qqp(path: Path) -> list[LabelledExample]:
    """Rows of two questions and 0 or 1; the published file has a few that are cut off, which are left out."""
    rows = _rows(path, ("question1", "question2", "is_duplicate"), skip_short=True)
    kept = (row for _, row in rows if row[-1] in ("0", "1"))
    return [LabelledExample(((first, second),), int(label)) for first, second, label in kept]


def read_squad(path: Path) -> list[SpanExample]:
    """Every question of a SQuAD 1.1 or 2.0 file."""
    examples = []
    try:
        for article in _json(_read(path), path)["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    answers = [] if question.get("is_impossible") else question["answers"]
                    texts = tuple(str(answer["text"]) for answer in answers)
                    starts = tuple(int(answer["answer_start"]) for answer in answers)
                    examples.append(SpanExample(question["question"], paragraph["context"], texts, starts))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadInput(f"{path} is not a SQuAD file: {type(error).__name__} {error}") from error
    return examples


def read_race(folder: Path) -> list[LabelledExample]:
    """Every question of a folder such as `train/middle`, or of `train` with `middle` and `high` in it."""
    files = sorted(folder.rglob("*.txt"))
    if not files:
        raise DataMissing(f"there are no .txt files in {folder}")
    examples = []
    for path in files:
        for line, text in enumerate(_read(path).splitlines(), 1):
            try:
                passage = _json(text, path)
                parts = zip(passage["questions"], passage["options"], passage["answers"], strict=True)
                for question, options, answer in parts:
                    pairs = tuple((_fill(question, option), passage["article"]) for option in options)
                    examples.append(LabelledExample(pairs, "ABCD".index(answer)))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise BadInput(f"{path} line {line} is not a RACE passage: {error}") from error
    return examples


def _fill(question: str, option: str) -> str:
    """The option in the place of the blank, or after a question without one (Megatron-LM tasks/race/data.py)."""
    return question.replace("_", option) if "_" in question else f"{question} {option}"


def _rows(path: Path, columns: tuple[str, ...], skip_short: bool = False) -> Iterator[tuple[int, list[str]]]:
    lines = _read(path).split("\n")
    header = lines[0].rstrip("\r").split("\t")
    if missing := [column for column in columns if column not in header]:
        raise BadInput(f"{path} has no column {missing[0]!r} in its first line")
    places = [header.index(column) for column in columns]
    for number, line in enumerate(lines[1:], 2):
        cells = line.rstrip("\r").split("\t")
        if line and len(cells) == len(header):
            yield number, [cells[place].strip() for place in places]
        elif line and not skip_short:
            raise BadInput(f"{path} line {number} has {len(cells)} columns, its header {len(header)}")


def _read(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except FileNotFoundError as error:
        raise DataMissing(f"there is no file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error


def _json(text: str, path: Path) -> dict[str, Any]:
    value = parse_json(text)
    if not isinstance(value, dict):
        raise TypeError("it is not an object")
    return value
