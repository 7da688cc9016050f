"""One reproduction and its report, made once for all tests that only read them."""

import os
from pathlib import Path
from typing import NamedTuple

import pytest
from filelock import FileLock

from tests.reports.reproduction import build_page, write_reproduction
from tests.reports.runs import write_runs


class Built(NamedTuple):
    """A reproduction directory, its page's path, its page's text and the runs of experiments on
    it."""

    directory: Path
    page: Path
    html: str
    runs: list[Path]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    root = (
        tmp_path_factory.getbasetemp().parent
        / f"built-by-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
    )
    root.mkdir(exist_ok=True)
    with FileLock(root / "lock"):  # the workers of a test run share it
        if not (root / "directory").exists():
            directory = write_reproduction(root)
            build_page(directory, write_runs(root / "experiments"))
            (root / "directory").symlink_to(directory)
    directory = (root / "directory").resolve()
    page = directory / "report" / "index.html"
    runs = [
        path.parent
        for path in sorted((root / "experiments").glob("*/COMPLETE"))
        if not path.parent.is_symlink()
    ]
    return Built(directory, page, page.read_text(encoding="utf-8"), runs)
