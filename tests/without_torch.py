"""A pytest plugin for an environment without torch: what fails for want of it is skipped, and the
reason says so.

python -m pytest -p tests.without_torch
"""

import re
from collections.abc import Generator
from typing import TypeVar

import pytest

WANT = re.compile(r"torch is not installed|No module named '(torch|megatron|accelerate)\b")
"""What is said by our commands, and by Python of torch and of the test extras that need it."""

Report = TypeVar("Report", pytest.CollectReport, pytest.TestReport)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file or folder whose import fails."""
    return _skipped_for_want_of_torch((yield), collector)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that imports torch later, or starts a program that does."""
    return _skipped_for_want_of_torch((yield), item)


def _skipped_for_want_of_torch(report: Report, node: pytest.Item | pytest.Collector) -> Report:
    if report.failed and WANT.search(
        report.longreprtext + "".join(text for _, text in report.sections)
    ):
        report.outcome = "skipped"
        report.longrepr = (str(node.path), None, "Skipped: torch is not installed")
    return report
