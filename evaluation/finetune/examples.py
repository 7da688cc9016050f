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
class PairExample:
    """Two texts that belong to one of several classes."""

    first: str
    second: str
    label: int


@dataclass(frozen=True)
class ChoiceExample:
    """A passage and, for each option, the question with that option in it."""

    passage: str
    options: tuple[str, ...]
    label: int


@dataclass(frozen=True)
class SpanExample:
    """A question whose answer is a part of the context; without answers it cannot be told from it."""

    question: str
    context: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]
    """Character at which each answer begins."""


Example = PairExample | ChoiceExample | SpanExample


def read_mnli(path: Path) -> list[PairExample]:
    """Rows with a gold label; those marked `-`, on which annotators did not agree, are left out."""
    examples = []
    for line, row in _rows(path, ("sentence1", "sentence2", "gold_label")):
        first, second, label = row
        if label == "-":
            continue
        if label not in MNLI_LABELS:
            raise BadInput(f"{path} line {line}: {label!r} is none of {', '.join(MNLI_LABELS)}")
        examples.append(PairExample(first, second, MNLI_LABELS.index(label)))
    return examples


def read_qqp(path: Path) -> list[PairExample]:
    """Rows of two questions and 0 or 1; the published file has a few that are cut off, which are left out."""
    rows = _rows(path, ("question1", "question2", "is_duplicate"), skip_short=True)
    return [PairExample(first, second, int(label)) for _, (first, second, label) in rows if label in ("0", "1")]


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


def read_race(folder: Path) -> list[ChoiceExample]:
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
                    filled = tuple(_fill(question, option) for option in options)
                    examples.append(ChoiceExample(passage["article"], filled, "ABCD".index(answer)))
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
