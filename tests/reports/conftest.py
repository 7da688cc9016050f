"""One reproduction and its report, made once for all tests that only read them."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.reports.reproduction import build_page, write_benchmarks, write_reproduction
from tests.reports.runs import write_runs


class Built(NamedTuple):
    """A reproduction directory, its page's path and its page's text."""

    directory: Path
    page: Path
    html: str


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    root = tmp_path_factory.mktemp("runs")
    directory = write_reproduction(root, trained=True)
    page = build_page(directory, write_benchmarks(root), write_runs(root / "experiments"))
    return Built(directory, page, page.read_text(encoding="utf-8"))
