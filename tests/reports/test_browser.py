"""The page in a real browser: no console message, nothing too wide, search, addresses, print, and what axe says."""

import re
from pathlib import Path

import pytest

from mlm_repro.experiments.catalogue import every_claim
from tests.reports.browser import BROWSER, browse
from tests.reports.conftest import Built
from tests.reports.test_page import FIGURES

PROBE, AXE = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("probe.js", "axe.js"))
FRAME = """
<!DOCTYPE html><title>waiting</title>
<script>addEventListener("message", function (event) {{ document.title = event.data; }});</script>
<iframe src="probe.html" style="border: 0; width: {width}px; height: 900px"></iframe>
"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")


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
def test_the_page_can_be_searched_and_addressed(built: Built, tmp_path: Path, width: int, contents: str) -> None:
    (tmp_path / "probe.html").write_text(
        built.html.replace("</body>", f"<script>{PROBE}</script></body>"), encoding="utf-8"
    )
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width=width), encoding="utf-8")
    flags = ("--window-size=1400,1000", "--virtual-time-budget=5000", "--dump-dom")
    done = browse(frame, tmp_path / "profile", *flags)
    match = re.search(r"<title>([^<]+)</title>", done.stdout)
    assert match, done.stderr[-2000:]
    claims = len(every_claim())
    assert match[1].split() == [
        contents, "sticky",  # the contents stay in sight
        "10", "true", "0", "0",  # found by words; with a verdict besides; as many as the cell says that leads there
        "dark",
        "true", str(claims),  # an address opens its row and ends the search
        "0",  # nothing is folded in print
        "0", "true", str(width),  # nothing is clipped, nothing wider than the window
    ]  # fmt: skip
    assert "CONSOLE" not in done.stderr


@pytest.mark.parametrize("width", [1280, 400])
def test_axe_finds_no_serious_violation(built: Built, tmp_path: Path, width: int) -> None:
    axe = pytest.importorskip("axe_core_python", reason="axe-core-python is not installed (the extra `test` has it)")
    source = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    page = tmp_path / "page.html"
    scripts = f"<script>{source}</script><script>{AXE}</script></body>"
    page.write_text(built.html.replace("</body>", scripts), encoding="utf-8")
    flags = (f"--window-size={width},1000", "--virtual-time-budget=100000", "--dump-dom")
    done = browse(page, tmp_path / "profile", *flags)
    match = re.search(r"<title>(axe \d+ passed; [^<]+)</title>", done.stdout)
    assert match, done.stderr[-2000:]
    assert match[1].endswith("; nothing serious")
