"""What must hold before any test imports anything."""

import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported; without effect where it is not

DEAREST = (
    "tests/experiments/test_chaos.py",
    "tests/engine/test_layouts.py",
    "tests/engine/test_resume_layouts.py",
    "tests/engine/test_failures.py",
    "tests/experiments/launch/test_slurm.py",
    "tests/experiments/test_bench.py",
    "tests/experiments/test_reproduce.py",
    "tests/engine/test_memory.py",
    "tests/data_pipeline/test_memory.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first: a file is one worker's, and a long one at the end leaves others idle."""
    places = {name: place for place, name in enumerate(DEAREST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(DEAREST)))
