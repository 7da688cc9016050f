"""`python -m benchmarks start`: seconds are those of a program and its children, and a failure is named."""

import sys
from pathlib import Path

import pytest

from benchmarks.start import case
from benchmarks.timing import child_seconds
from mlm_repro.lineage.errors import UserError

SPEND = "import time\nwhile time.process_time() < {}: pass"


def test_seconds_are_those_of_a_program_and_its_children(tmp_path: Path) -> None:
    (tmp_path / "spend.py").write_text(SPEND.format(0.5))
    both = f"import subprocess, sys; subprocess.run([sys.executable, {str(tmp_path / 'spend.py')!r}]);"
    assert 0.9 < child_seconds(sys.executable, "-c", both + SPEND.format(0.5)) < 3
    assert child_seconds(sys.executable, "-c", "import time; time.sleep(0.6)") < 0.5
    with pytest.raises(UserError, match="failed: why"):
        child_seconds(sys.executable, "-c", "import sys; sys.exit('why')")


def test_the_first_call_is_not_counted() -> None:
    taken = iter([9.0, 2.0, 4.0])
    found = case("small", 2, lambda: next(taken), 1.5, "empty", lambda: 2.0)
    assert found.ratios[0].rounds == [1.0, 2.0]
    assert found.ratios[0].goal == 1.5
