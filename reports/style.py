"""One palette for the page and its figures, in light and dark, and the look of each model and each kind.

Model colours are from Okabe and Ito's colour-blind-safe set, lightened on a dark page; markers differ as well, so that
figures can be read in grey.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from lineage.records import Kind

PALETTE = {
    "paper": ("#fcfbf8", "#16171a"),
    "raised": ("#f5f2ea", "#1f2125"),
    "ink": ("#1d1c19", "#ebe8e1"),
    "muted": ("#625e55", "#a9a59b"),
    "rule": ("#dbd6ca", "#383a3f"),
    "model-0": ("#d55e00", "#f0883e"),
    "model-1": ("#008f68", "#2cc296"),
    "model-2": ("#0072b2", "#56b4e9"),
    "model-3": ("#b0578a", "#dd94bd"),
    "model-4": ("#8a6d00", "#e6c04a"),
    "kept": ("#33658a", "#6ea4c9"),
    "dropped": ("#b8ae9a", "#6d675b"),
    "good": ("#006b4f", "#4fd0a8"),
    "alert": ("#9a3b00", "#f2a071"),
}
"""Each colour on a light page and on a dark one."""
LIGHT = {name: light for name, (light, _) in PALETTE.items()}
MARKERS = ("o", "s", "^", "D", "v")
KIND_GLYPHS: dict[Kind, str] = {"published": "○", "scaled": "●", "measured": "■", "computed": "△", "simulated": "◇"}
KIND_MEANINGS: dict[Kind, str] = {
    "published": "read from the cited document, not produced here",
    "scaled": "measured here on a shrunk twin of the published model",
    "measured": "measured here on the published configuration",
    "computed": "worked out by the source's own closed form; nothing was run",
    "simulated": "predicted by a cost model; nothing was run",
}


class Look(NamedTuple):
    """How a model is drawn wherever it is drawn."""

    color: str
    marker: str


def look(rank: int) -> Look:
    """The look of the model at this place by size."""
    place = rank % len(MARKERS)
    return Look(LIGHT[f"model-{place}"], MARKERS[place])


def theme_css() -> str:
    """Custom properties for both themes: the system's choice, unless the page's switch set `data-theme`."""
    light, dark = ("".join(f"--{name}:{pair[place]};" for name, pair in PALETTE.items()) for place in (0, 1))
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light])"
        f"{{color-scheme:dark;{dark}}}}}\n"
        f"@media screen{{:root[data-theme=dark]{{color-scheme:dark;{dark}}}}}\n"
    )


def follow_theme(svg: str) -> str:
    """The drawing with each palette colour replaced by the page's custom property of that name."""
    names = {value: name for name, value in LIGHT.items()}
    pattern = re.compile("|".join(names))
    return pattern.sub(lambda match: f"var(--{names[match[0]]})", svg)


@contextmanager
def figure_style(salt: str) -> Iterator[None]:
    """Matplotlib settings for drawing and saving; `salt` keeps element names of two drawings apart."""
    import matplotlib

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9,
        "text.color": LIGHT["ink"],
        "axes.titlesize": 9.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.labelsize": 9,
        "axes.labelcolor": LIGHT["muted"],
        "axes.edgecolor": LIGHT["muted"],
        "axes.linewidth": 0.7,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": LIGHT["rule"],
        "grid.linewidth": 0.6,
        "xtick.color": LIGHT["muted"],
        "ytick.color": LIGHT["muted"],
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "lines.linewidth": 1.8,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "hatch.linewidth": 0.6,
    }
    with matplotlib.rc_context(settings):
        yield
