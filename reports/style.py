"""One palette for the page and its figures, in light and dark, and the look of each model and each
kind.

Model colours are from Okabe and Ito's colour-blind-safe set, lightened on a dark page; markers
differ as well, so that figures can be read in grey.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

from jinja2 import Environment, PackageLoader, StrictUndefined

from mlm_repro.experiments.verdicts import Outcome
from mlm_repro.lineage.config import read_toml
from mlm_repro.lineage.numbers import printable, show
from mlm_repro.lineage.records import Kind

STYLE = read_toml(Path(__file__).with_name("style.toml"))
PALETTE: dict[str, tuple[str, str]] = STYLE["palette"]
"""Name of a colour → the colour on a light page and on a dark one."""
LIGHT = {name: light for name, (light, _) in PALETTE.items()}
LINES: dict[str, dict[str, Any]] = {
    name: {key: LIGHT.get(value, value) for key, value in line.items()}
    for name, line in STYLE["lines"].items()
}
"""Kind of number, or name of another line → Matplotlib's settings of the line and its marker, and
its name in a key."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
KIND_GLYPHS: dict[Kind, str] = {kind: glyph for kind, (glyph, _) in STYLE["kinds"].items()}
KIND_MEANINGS: dict[Kind, str] = {kind: meaning for kind, (_, meaning) in STYLE["kinds"].items()}
CONFIDENCES: dict[str, str] = STYLE["confidences"]
"""Way in which a claim was read → words for it."""


class OutcomeLook(NamedTuple):
    """The look of a verdict's outcome on the page: its glyph, and its meaning in words."""

    glyph: str
    meaning: str


LOOKS: dict[Outcome, OutcomeLook] = {
    outcome: OutcomeLook(*STYLE["outcomes"][outcome]) for outcome in get_args(Outcome)
}
"""Outcome of a verdict → its glyph and meaning, in the order of the page."""


def look(rank: int) -> tuple[str, str]:
    """Return a pair of texts, the colour, as on a light page, and Matplotlib's marker, of the
    series with the number `rank`, counted from 0, the same in every figure. The pairs repeat after
    as many series as there are markers."""
    index = rank % len(MARKERS)
    return LIGHT[f"model-{index}"], MARKERS[index]


def theme_css() -> str:
    """Return CSS as text that defines a custom property `--NAME` for each colour of PALETTE, with
    its value in the light or the dark theme, and sets `color-scheme`. On screens the theme is the
    system's choice, unless the page's switch sets `data-theme` on the root; in print it is the
    light one."""
    light, dark = (
        "".join(f"--{name}:{pair[index]};" for name, pair in PALETTE.items()) for index in (0, 1)
    )
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light])"
        f"{{color-scheme:dark;{dark}}}}}\n"
        f"@media screen{{:root[data-theme=dark]{{color-scheme:dark;{dark}}}}}\n"
    )


def follow_theme(svg: str) -> str:
    """Return the text of an SVG with each colour of the light palette replaced by the page's custom
    property of that colour's name, which follows the theme."""
    names = {value: name for name, value in LIGHT.items()}
    pattern = re.compile("|".join(names))
    return pattern.sub(lambda match: f"var(--{names[match[0]]})", svg)


@contextmanager
def figure_style(salt: str) -> Iterator[None]:
    """Context manager: inside the block Matplotlib has the settings that style.toml has for
    figures. The names of elements in an SVG follow from the text `salt`, so each drawing on a page
    needs another."""
    import matplotlib

    named = {name: LIGHT.get(str(value), value) for name, value in STYLE["figures"].items()}
    with matplotlib.rc_context({**named, "svg.hashsalt": salt}):
        yield


def powers(text: str) -> str:
    """Return the text with each `^number`, such as ^-3, in superscript digits, and with control
    characters below U+0020, other than line feeds and tabs, as visible symbols."""
    raised = str.maketrans("0123456789-.", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻·")
    return re.sub(r"\^(-?\d+(?:\.\d+)?)", lambda match: match[1].translate(raised), printable(text))


@cache
def template_environment() -> Environment:
    """Return Jinja's environment for the templates of pages, with the filters `printable`, `show`
    and `powers`: an unknown name is an error, and values are escaped. Every call returns the same
    object."""
    environment = Environment(
        loader=PackageLoader("mlm_repro.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"printable": printable, "show": show, "powers": powers}
    return environment
