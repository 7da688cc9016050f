"""The figure of LAMB's norms is drawn from the metrics of a run, and says what they hold."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_repro.engine.run.files import METRICS, NORM_EDGES, Step
from mlm_repro.lineage.run import RunDirectory
from mlm_repro.reports.trust_ratio import QUANTITIES, quantile, trust_ratio_exhibit
from tests.commands import call


def counts_of(values: list[float]) -> list[int]:
    return np.bincount(np.digitize(values, NORM_EDGES), minlength=len(NORM_EDGES) + 1).tolist()


@given(st.lists(st.floats(1e-3, 1e3), min_size=1), st.floats(0, 1))
def test_a_quantile_is_known_to_its_bin(values: list[float], share: float) -> None:
    found = quantile(counts_of(values), share)
    lower, upper = (np.quantile(values, share, method=method) for method in ("lower", "higher"))
    assert lower / 1.34 < found < upper * 1.34


def write_run(root: Path, optimizer: str, ratios: list[list[float]]) -> Path:
    run = RunDirectory.begin(root, "small", "training", {"train": {"optimizer": optimizer}}, {}).path
    lines = [
        Step(
            kind="train", iteration=number, loss=2.0, learning_rate=0.1, seconds=1.0, tokens_per_second=1.0,
            model_tflops=1.0, **{key: counts_of(each) for key in QUANTITIES if each},
        ).to_line()
        for number, each in enumerate(ratios, 1)
    ]  # fmt: skip
    (run / METRICS).write_text("".join(lines), encoding="utf-8")
    return run


@pytest.mark.parametrize("size", [3, 1500])
def test_the_figure_of_a_run_says_how_many_ratios_reach_the_clip(size: int, tmp_path: Path) -> None:
    run = write_run(tmp_path, "lamb", [[], *[[0.01, 0.2, 0.7, 9.9]] * size, [0.01, 0.2, 12.0, 10.0]])
    for form, said in (("svg", "trust ratio"), ("csv", f"{size + 2},trust ratio,0.0115,")):
        done = call({}, "mlm-report", "figure", "trust-ratio", run, "--format", form, "--out", tmp_path)
        assert done.code == 0, done.err
        assert said in (tmp_path / f"trust-ratio.{form}").read_text(encoding="utf-8")
    caption = " ".join(trust_ratio_exhibit(run).caption)
    assert f"4 tensors in {size + 1} updates by lamb" in caption
    assert f"at the end 2 of 4, first in iteration {size + 2}." in caption


def test_a_run_without_ratios_is_refused(tmp_path: Path) -> None:
    done = call({}, "mlm-report", "figure", "trust-ratio", write_run(tmp_path, "adam", [[]]))
    assert done.code == 2
    assert "is a training: `mlm-report run " in done.err
