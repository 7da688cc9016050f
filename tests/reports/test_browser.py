"""The page in a real browser: no console message, figures in place, nothing wider than the window."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.reports.conftest import Built
from tests.reports.test_page import FIGURES

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    *("--enable-logging=stderr", "--v=0"),
]
PROBE = """
<script>
document.querySelectorAll("details").forEach(function (part) { part.open = true; });
var clipped = Array.from(document.querySelectorAll(".plot svg text")).filter(function (text) {
  var inner = text.getBoundingClientRect(), outer = text.ownerSVGElement.getBoundingClientRect();
  return inner.width && (inner.left < outer.left - 1 || inner.right > outer.right + 1 ||
    inner.top < outer.top - 1 || inner.bottom > outer.bottom + 1);
});
document.getElementById("theme").click();
var search = document.getElementById("claim-search");
function shown() { return document.querySelectorAll("#claims tbody tr:not([hidden])").length; }
search.value = "2021/figure-12 simulated";
search.dispatchEvent(new Event("input"));
var found = shown();
var cell = document.querySelector(".outcomes a[data-experiment='2019/figure-1']");
cell.click();
found += "/" + (shown() - Number(cell.textContent));
var form = document.querySelector("details.examples form"), output = form.querySelector("output");
form.elements.text.value = "WORD3";
form.elements.answers.value = "01";
form.elements.answers.dispatchEvent(new Event("change"));
found += "/" + output.textContent.split(" ")[0];
form.elements.answers.value = "mixed";
form.elements.text.value = "";
form.elements.text.dispatchEvent(new Event("input"));
found += "/" + output.textContent.split(" ")[0];
var root = document.documentElement;
parent.postMessage([root.scrollWidth, window.innerWidth, clipped.length, found, root.dataset.theme].join(" "), "*");
</script></body>
"""
FRAME = """
<!DOCTYPE html><title>waiting</title>
<script>addEventListener("message", function (event) {{ document.title = event.data; }});</script>
<iframe src="probe.html" style="border: 0; width: {width}px; height: 900px"></iframe>
"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")


def _browse(page: Path, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
    environment = {**os.environ, "HOME": str(profile)}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=environment, errors="replace"
    )


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_opens_without_a_console_message(built: Built, tmp_path: Path, dark: bool) -> None:
    theme = ["--force-dark-mode"] if dark else []
    done = _browse(built.page, tmp_path, "--window-size=1280,1000", "--dump-dom", *theme)
    assert "CONSOLE" not in done.stderr
    for name in FIGURES:
        assert f'<figure id="{name}"' in done.stdout
    drawn = len(list((built.page.parent / "figures").glob("*.svg")))
    assert done.stdout.count("<svg") == len(FIGURES) + drawn  # these are drawn for both widths
    assert f">{'Light' if dark else 'Dark'} page</button>" in done.stdout


@pytest.mark.parametrize("width", [1280, 480])
def test_nothing_is_wider_than_the_window(built: Built, tmp_path: Path, width: int) -> None:
    (tmp_path / "probe.html").write_text(built.html.replace("</body>", PROBE), encoding="utf-8")
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width=width), encoding="utf-8")
    flags = ("--window-size=1400,1000", "--virtual-time-budget=3000", "--dump-dom")
    done = _browse(frame, tmp_path / "profile", *flags)
    match = re.search(r"<title>(\d+) (\d+) (\d+) (\S+) (\w+)</title>", done.stdout)
    assert match, done.stderr[-2000:]
    content, window, clipped = (int(number) for number in match.groups()[:3])
    assert window == width
    assert content <= window
    assert clipped == 0
    assert match[4] == "10/0/1/3"  # of four examples one has the word and is right, on three the models disagree
    assert match[5] == "dark"
    assert "CONSOLE" not in done.stderr
