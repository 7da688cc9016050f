"""What a rank takes grows with the model as the closed form says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.guard.memory import MemoryGuard, PeakMemory
from tests.engine.small_run import mlm_train, write_toml

SHORT = {"iterations": 2, "warmup_iterations": 1, "microbatch_size": 2, "validation_samples": 4}
NARROW, WIDE = 64, 512
SMALLEST, LARGEST = 0.85, 1.5


@pytest.mark.parametrize("tp", [1, 2])
def test_memory_is_the_closed_form(tp: int, dataset: Path, tmp_path: Path) -> None:
    """The difference of two widths, in which the libraries that training loads cancel out.

    Buffers of initialisation and of messages come on top, and freed memory that is not used again: about a quarter,
    more or less by 20 MB from one process to the next.
    """

    def memory(hidden_size: int) -> dict[str, Any]:
        runs = tmp_path / str(hidden_size)
        toml = write_toml(tmp_path / "model.toml", dataset, **SHORT)
        model = {"num_layers": 4, "hidden_size": hidden_size, "num_heads": 8, "seq_length": 128}
        settings = [f"--set=model.{key}={value}" for key, value in model.items()]
        code, _, err = mlm_train("run", toml, f"--runs={runs}", f"--ranks={tp}", f"--set=parallel.tp={tp}", *settings)
        assert code == 0, err
        summary: dict[str, Any] = json.loads((runs / "small" / "summary.json").read_text(encoding="utf-8"))
        return dict(summary["memory"])

    narrow, wide = memory(NARROW), memory(WIDE)
    expected = wide["closed_form_bytes"] - narrow["closed_form_bytes"]
    found = [after - before for before, after in zip(narrow["measured_bytes"], wide["measured_bytes"], strict=True)]
    assert len(found) == tp
    assert all(SMALLEST < each / expected < LARGEST for each in found), (found, expected)


def test_an_allocator_near_the_limit_is_told_once() -> None:
    pressure = MemoryGuard(PeakMemory(torch.device("cpu")))
    said = [
        pressure.look({"num_alloc_retries": retries, "reserved_bytes.all.peak": 79 * 2**30})
        for retries in (3, 3, 5, 5, 9)
    ]
    assert [bool(one) for one in said] == [False, False, True, False, False]
    assert "79.0 GiB reserved" in said[2]
    assert "emptied its cache 2 times" in said[2]
