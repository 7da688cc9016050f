"""Chromium, where the machine has one: a page is opened and what became of it is read."""

import os
import shutil
import subprocess
from pathlib import Path

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = [
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    ),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    *("--enable-logging=stderr", "--v=0"),
]


def browse(page: Path | str, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Open a page, a file or an address, without a window; `--dump-dom` prints it as its scripts
    left it."""
    command = [
        str(BROWSER),
        *FLAGS,
        f"--user-data-dir={profile}",
        *flags,
        page if isinstance(page, str) else page.as_uri(),
    ]
    environment = {**os.environ, "HOME": str(profile)}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment,
        errors="replace",
    )
