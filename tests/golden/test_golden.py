"""What shipped commands say is a function of the source; a meant change writes golden.json anew and
says why."""

import json
import sys
from pathlib import Path

import pytest

from tests.golden.digests import of_commands, of_text, timeless

KEPT = Path(__file__).with_name("golden.json")


def test_commands_say_what_they_said(tmp_path: Path) -> None:
    assert of_commands(Path(sys.executable).parent, tmp_path) == json.loads(KEPT.read_text())


@pytest.mark.parametrize("other", ["0.1234567892", "1.234567891"])
def test_nine_digits_count(other: str) -> None:
    assert (of_text("a 0.1234567891 b") == of_text(f"a {other} b")) == (other == "0.1234567892")


def test_times_and_digests_are_left_out() -> None:
    assert timeless({"seconds": 1, "a": [{"digest": 2, "run": "8.3b-0123abcd"}]}) == {
        "a": [{"run": "8.3b"}]
    }
