"""docs/reliability.md names tests that exist, for every fault it lists, and lists each attack that
is held."""

import re

from tests.architecture.rooms import ROOT, parse

ROWS = re.compile(r"^\| (?!fault \| |-)(.+?) \| .+? \| (.+) \|$", re.MULTILINE)
NUMBERS = re.compile(r"\(([\d, ]+)\)$")
NAME = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_fault_has_tests_that_exist() -> None:
    rows = ROWS.findall((ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"))
    assert len(rows) >= 25
    for fault, named in rows:
        names = NAME.findall(named)
        assert names, fault
        assert NAME.sub("", named).strip() == "", fault
        for file, name in names:
            assert any(getattr(node, "name", "") == name for node in parse(ROOT / file).body), (
                fault,
                file,
                name,
            )
    numbers = [
        int(number)
        for fault, _ in rows
        for found in NUMBERS.findall(fault)
        for number in found.split(", ")
    ]
    assert sorted(numbers) == [*range(1, 29)]
