"""Every erratum follows from the published numbers, derived here once more, and its command shows them."""

import re
import shlex
from fnmatch import fnmatchcase

import pytest

from mlm_repro.experiments.catalogue import every_claim, every_erratum
from mlm_repro.experiments.cli import main
from tests.architecture.rooms import ROOT
from tests.commands import Command

PAGE = (ROOT / "docs" / "errata.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\d+) [^\n]+\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
ROWS = dict(re.findall(r"^\| \[(\d+)\]\([^)]+\) \| (.*) \|$", PAGE, re.MULTILINE))
VALUES = {claim.id: float(claim.value) for claim in every_claim()}
PRINTED = {
    str(number): [name for name in VALUES if any(fnmatchcase(name, each) for each in erratum.claims)]
    for number, erratum in enumerate(every_erratum(), 1)
}
"""Claims with the numbers that each erratum quotes."""


def overhead(hidden: int, sequence: int = 2048) -> float:
    """Share of a layer's operations that computing its attention scores and their product with V again adds, in %."""
    scores = 2 * sequence**2 * hidden  # multiply-adds
    products = 4 * sequence * hidden**2 + 2 * sequence * hidden * 4 * hidden
    forward = 2 * products + 2 * scores
    return 100 * 2 * scores / (3 * forward)


def gains(figure: str, faster: str, slower: str) -> list[float]:
    """Throughput of one curve over another at each x that both have, in %."""
    curves = [
        {name.rpartition("/")[2]: value for name, value in VALUES.items() if name.startswith(f"2021/{figure}/{curve}/")}
        for curve in (faster, slower)
    ]
    return [100 * (curves[0][x] / curves[1][x] - 1) for x in curves[0] if x in curves[1]]


def parameters(layers: int, hidden: int, rows: int = 51_200 + 2_048) -> tuple[float, float]:
    """Numbers in the layers and in all of a GPT, 10⁹."""
    layer = 12 * hidden**2 + 13 * hidden
    return layers * layer / 1e9, (layers * layer + rows * hidden + 2 * hidden) / 1e9


def test_the_errata_follow_from_what_is_printed() -> None:
    """Every number that the page derives, from the claims or from a formula of its own."""
    said = {number: f"{ROWS[number]} {SECTIONS[number]}" for number in ROWS}
    interleaved = gains("figure-12", "interleaved", "non-interleaved")
    shapes = ((3, 20_480), (24, 20_480), (32, 20_480), (80, 12_288))
    inside, whole = zip(*(parameters(layers, hidden) for layers, hidden in shapes), strict=True)
    total, single = VALUES["2019/abstract/total-512"], VALUES["2019/text/single-gpu"]
    derived = {
        "1": [f"{overhead(12_288):.2f} %", f"{overhead(20_480):.2f} %"],
        "2": [f"{-min(gains('figure-17', 'recompute', 'no-recompute')):.0f} %"],
        "3": [f"{interleaved[-1]:.0f} % at batch 60", ", ".join(f"{gain:.0f} %" for gain in interleaved[:-1])],
        "4": [f"{number:.1f}B" for number in (*inside, *whole)],
        "5": [f"{2560 // 4} GPUs"],
        "6": [f"{100 * 1000 * total / 512 / single:.1f} %"],
        "7": [],
        "8": [f"{100 * (34 / 8) / (10 + 24 / 8 + 64 / 8):.1f} %", f"{100 * 4.25 / 23:.1f} %"],
        "9": [f"{14 * VALUES['2021/table-1/1008.0b/parameters'] / 1e3:.1f} TB"],
        "10": [f"{100 * (max(curve) / min(curve) - 1):.0f} %" for curve in (
            [value for name, value in VALUES.items() if name.startswith(f"2021/figure-16/b={batch}/")]
            for batch in (128, 512)
        )],
        "11": [f"{8.3 / 1.5:.1f} times", f"{8.3 / 1.5:.2f}", f"{8.3 / VALUES['2019/blog/gpt-2-multiple']:.2f}B",
               f"{parameters(48, 1_600)[0]:.3f}B"],
    }  # fmt: skip
    assert ROWS.keys() == SECTIONS.keys() == derived.keys() == PRINTED.keys()
    for row, erratum in zip(ROWS.values(), every_erratum(), strict=True):
        assert row == f"{erratum.place} | {erratum.printed} | {erratum.follows}"
    for number, text in said.items():
        for words in (*derived[number], *(f"{VALUES[name]:g}" for name in PRINTED[number])):
            assert re.search(rf"(?<![\d.]){re.escape(words)}(?!\d)", text), f"{number} does not say {words}"


@pytest.mark.parametrize("number", SECTIONS)
def test_a_command_shows_the_printed_numbers(number: str, command: Command) -> None:
    (line,) = re.findall(r"^```sh\n(.+)\n```$", SECTIONS[number], re.MULTILINE)
    done = command(main, *shlex.split(line))
    assert done.code in (0, 3), done.err
    rows = {row.partition(" ")[0]: row for row in done.out.splitlines()}
    shown = [name for name in PRINTED[number] if name in rows]
    assert shown
    assert [name for name in shown if f"{VALUES[name]:g}" not in rows[name]] == []
