"""Damaged files of every kind that is read from outside get an answer or one of the documented
errors."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import fuzz as fuzzing
from tests.foreign_files import READERS
from tests.fuzz import TooLong, fuzz
from tests.reader import Reader, bytes_at

CASES = 200


@pytest.mark.parametrize(
    "reader", READERS, ids=[reader.name.replace(" ", "-") for reader in READERS]
)
def test_a_damaged_file_is_read_or_refused(reader: Reader) -> None:
    cases = max(reader.cases // 4, 20)
    assert sum(fuzz(reader, cases).values()) >= cases


def raise_at_zero(path: Path) -> None:
    if b"\x00" in path.read_bytes():
        raise KeyError("zero")


def hang_at_zero(path: Path) -> None:
    while b"\x00" in path.read_bytes():
        pass


@pytest.mark.parametrize(("read", "error"), [(raise_at_zero, KeyError), (hang_at_zero, TooLong)])
def test_a_fault_is_found(
    read: Callable[[Path], None], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzing, "CASE_SECONDS", 0.05)
    with pytest.raises(error):
        fuzz(Reader("planted", bytes_at("a", b"one two"), read), CASES)
