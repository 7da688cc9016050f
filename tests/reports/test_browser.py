"""The page in a real browser: no console message, nothing too wide, search, addresses, print, and
what axe says."""

import re
from html import unescape
from pathlib import Path

import pytest

from mlm_repro.experiments.catalogue import every_claim
from mlm_repro.reports.style import LOOKS
from tests.reports.browser import BROWSER, browse
from tests.reports.conftest import Built
from tests.reports.test_page import FIGURES

PROBE, AXE, OVERLAP = (
    Path(__file__).with_name(name).read_text(encoding="utf-8")
    for name in ("probe.js", "axe.js", "overlap.js")
)
FRAME = """
<!DOCTYPE html><title>waiting</title>
<script>addEventListener("message", function (event) {{ document.title = event.data; }});</script>
<iframe src="probe.html" style="border: 0; width: {width}px; height: 900px"></iframe>
"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")


def framed(html: str, script: str, width: int, folder: Path) -> str:
    """What a script says of a page in a window of a width; Chromium makes none narrower than 500
    pixels."""
    (folder / "probe.html").write_text(
        html.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8"
    )
    frame = folder / "frame.html"
    frame.write_text(FRAME.format(width=width), encoding="utf-8")
    flags = ("--window-size=1700,1000", "--virtual-time-budget=5000", "--dump-dom")
    done = browse(frame, folder / "profile", *flags)
    match = re.search(r"<title>([^<]+)</title>", done.stdout)
    assert match, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr
    return unescape(match[1])


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_opens_without_a_console_message(built: Built, tmp_path: Path, dark: bool) -> None:
    theme = ["--force-dark-mode"] if dark else []
    done = browse(built.page, tmp_path, "--window-size=1280,1000", "--dump-dom", *theme)
    assert "CONSOLE" not in done.stderr
    for name in FIGURES:
        assert f'<figure id="{name}"' in done.stdout
    drawn = len(list((built.page.parent / "figures").glob("*.svg")))
    assert done.stdout.count("<svg") == drawn
    assert f">{'Light' if dark else 'Dark'} page</button>" in done.stdout


@pytest.mark.parametrize(("width", "contents"), [(1280, "open"), (400, "folded")])
def test_the_page_can_be_searched_and_addressed(
    built: Built, tmp_path: Path, width: int, contents: str
) -> None:
    said = framed(built.html, PROBE, width, tmp_path)
    claims = len(every_claim())
    assert said.split() == [
        contents,
        "sticky",  # the contents stay in sight
        "10",
        "true",
        "0",
        "0",  # found by words; with a verdict besides; as many as the cell says that leads there
        "dark",
        "true",
        str(claims),  # an address opens its row and ends the search
        "0",  # nothing is folded in print
        "0",
        "true",
        str(width),  # nothing is clipped, nothing wider than the window
    ]


def with_every_tile(html: str) -> str:
    """The page as far as the tiles, with one of each outcome; its script, which looks for what
    follows, is left out."""
    tiles = "".join(
        f'<li class="{outcome}"><a href="#x"><b>178</b> <span class="mark {outcome}">{look.glyph} '
        f'{outcome.replace("-", " ")}</span></a> <span class="note">{look.meaning}</span></li>'
        for outcome, look in LOOKS.items()
    )
    before, rest = html.split('<ul class="tally">')
    above = rest.partition("</ul>")[2].partition('<section id="measured"')[0]
    return f'{before}<ul class="tally">{tiles}</ul>{above}</main></div></body></html>'


@pytest.mark.parametrize("width", [360, 400, 640, 1000, 1400, 1600])
def test_no_text_lies_over_other_text_or_out_of_its_box(
    built: Built, tmp_path: Path, width: int
) -> None:
    assert framed(with_every_tile(built.html), OVERLAP, width, tmp_path) == "0"


def test_each_colour_of_a_bar_is_in_the_legend(built: Built) -> None:
    bars = re.compile(r'<i class="([a-z-]+)"')
    key = re.search(r'<p class="key">.*?</p>', built.html, re.DOTALL)
    assert key
    assert set(bars.findall(built.html)) == set(bars.findall(key[0]))


CUT = """
var cut = Array.from(document.querySelectorAll(".plot, .scroll")).filter(function (part) {
  return part.scrollWidth > part.clientWidth + 2;
});
parent.postMessage(cut.length + " " + cut.filter(function (part) { return part.dataset.scroll; }).length, "*");
"""  # noqa: E501
"""Says how many parts are wider than their place, and how many of them say so."""


def test_a_figure_that_is_cut_says_that_it_scrolls(built: Built, tmp_path: Path) -> None:
    cut, marked = framed(built.html, CUT, 360, tmp_path).split()
    assert int(cut) == int(marked) > 0


def test_print_is_a_summary_of_two_pages(built: Built, tmp_path: Path) -> None:
    paper = tmp_path / "page.pdf"
    browse(built.page, tmp_path / "profile", f"--print-to-pdf={paper}", "--no-pdf-header-footer")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", paper.read_bytes())) <= 2


@pytest.mark.parametrize("width", [1280, 400])
def test_axe_finds_no_serious_violation(built: Built, tmp_path: Path, width: int) -> None:
    axe = pytest.importorskip(
        "axe_core_python", reason="axe-core-python is not installed (the extra `test` has it)"
    )
    source = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    page = tmp_path / "page.html"
    scripts = f"<script>{source}</script><script>{AXE}</script></body>"
    page.write_text(built.html.replace("</body>", scripts), encoding="utf-8")
    flags = (f"--window-size={width},1000", "--virtual-time-budget=100000", "--dump-dom")
    done = browse(page, tmp_path / "profile", *flags)
    match = re.search(r"<title>(axe \d+ passed; [^<]+)</title>", done.stdout)
    assert match, done.stderr[-2000:]
    assert match[1].endswith("; nothing serious")
