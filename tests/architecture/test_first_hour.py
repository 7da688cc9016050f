"""The first hour of docs/architecture.md is as long as it says."""

import re
from collections.abc import Iterator

import pytest

from tests.architecture.rooms import ROOT

NAMED = re.compile(r"`(engine/[\w/]*)(\{[\w,]+\}|\w+)\.py`")
MOST_WRONG = 0.1


def first_hour() -> str:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return text.partition("## The first hour")[2]


def files_in(section: str) -> Iterator[str]:
    """Files of a list such as `engine/model/{gpt2,transformer}.py`."""
    for folder, names in NAMED.findall(section):
        yield from (f"{folder}{name}.py" for name in names.strip("{}").split(","))


def stated_lines(section: str) -> int:
    (number,) = re.findall(r"[Aa]bout ([\d,]+) lines", section)
    return int(number.replace(",", ""))


def is_right(section: str) -> bool:
    lines = sum(
        len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files_in(section)
    )
    return abs(lines - stated_lines(section)) <= MOST_WRONG * lines


def test_it_is_as_long_as_it_says() -> None:
    assert len(list(files_in(first_hour()))) > 10
    assert is_right(first_hour())


@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_another_length_is_noticed(factor: float) -> None:
    section = first_hour()
    changed = re.sub(r"(?<=[Aa]bout )[\d,]+", str(round(factor * stated_lines(section))), section)
    assert not is_right(changed)


def test_a_file_that_is_left_out_is_noticed() -> None:
    section, trainer = first_hour(), "`engine/trainer.py`"
    assert trainer in section
    assert not is_right(section.replace(trainer, ""))
