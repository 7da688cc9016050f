"""What the papers' tables say of themselves, to the digits they print, from this project's closed forms."""

import csv

import numpy as np
import pytest

from engine.config import ParallelConfig
from engine.costs import activation_bytes_per_layer, flops_per_iteration, parameter_count
from engine.pipeline.schedule import ideal_bubble
from experiments.simulator.measurements import FOLDER, workload_of
from experiments.simulator.timeline import makespan_seconds, order_of
from experiments.simulator.workload import Workload, checked_config

RUNS = [row for name in ("ptd-p-runs.csv", "megatron-2019-runs.csv") for row in csv.DictReader((FOLDER / name).open())]
TABLE_1 = [row for row in RUNS if row["experiment"] == "ptd-p/table-1"]
AGGREGATE_PFLOPS = (4.4, 8.8, 18.2, 34.6, 70.8, 143.8, 227.1, 297.4, 410.2, 502.0)
PERCENT_OF_PEAK = (44, 44, 46, 43, 44, 45, 47, 50, 52, 52)
DAYS_OF_300_BILLION_TOKENS = (84, 43, 23, 156, 80, 42)
FIGURE_7 = {1: 68, 2: 78, 4: 86, 8: 89, 16: 91}
"""TFLOP/s by microbatch."""


def equation_2(w: Workload) -> float:
    """2021 paper: parameters."""
    h, layers = w.hidden, w.layers
    return 12 * layers * h * h * (1 + 13 / (12 * h) + (w.vocab + w.seq) / (12 * layers * h))


def matmul_flops(w: Workload) -> float:
    """Counted product by product, with the layers' forward pass done twice."""
    tokens, h = w.global_batch * w.seq, w.hidden
    linears = sum(2 * tokens * rows * columns for rows, columns in ((h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)))
    attention = 2 * (2 * w.global_batch * w.seq * w.seq * h)
    return 4 * w.layers * (linears + attention) + 3 * (2 * tokens * h * w.vocab)


@pytest.mark.parametrize("row", RUNS, ids=lambda row: f"{row['experiment']} {row['series']} {row['gpus']}")
def test_parameters_and_flops_of_every_published_row(row: dict[str, str]) -> None:
    workload = workload_of(row)
    config = checked_config(workload)
    if workload.padded_vocab == workload.vocab:
        flops = flops_per_iteration(config.model, config.train, recompute=True)
        assert flops == pytest.approx(matmul_flops(workload), rel=1e-12)
    unpadded = config.model.model_copy(update={"padded_vocab_size": workload.vocab})
    assert parameter_count(unpadded) == pytest.approx(equation_2(workload), rel=1e-4)
    name = row["series"].removeprefix("PTD-P ").removeprefix("BERT ")
    if name.endswith("B"):
        printed = name.removesuffix("B")
        digits = len(printed.partition(".")[2])
        assert round(parameter_count(unpadded) / 1e9, digits) == pytest.approx(float(printed), abs=10**-digits / 10)


@pytest.mark.parametrize("place", range(10))
def test_table_1_of_2021_agrees_with_itself(place: int) -> None:
    row = TABLE_1[place]
    tflops, gpus = float(row["tflops_per_gpu"]), int(row["gpus"])
    assert tflops * gpus / 1e3 == pytest.approx(AGGREGATE_PFLOPS[place], abs=0.05 + 0.5 * gpus / 1e3)  # both rounded
    assert 100 * tflops / 312 == pytest.approx(PERCENT_OF_PEAK[place], abs=0.51)


def test_table_2_of_2021_in_days() -> None:
    """300 billion tokens at the printed TFLOP/s take the printed days, to a day (both numbers are rounded)."""
    rows = [row for row in RUNS if row["experiment"] == "ptd-p/table-2"]
    days = []
    for row in rows:
        workload = workload_of(row)
        config = checked_config(workload)
        flops = flops_per_iteration(config.model, config.train, recompute=True)
        seconds = flops / (float(row["tflops_per_gpu"]) * 1e12 * workload.gpus)
        days.append(seconds * 300e9 / (workload.global_batch * workload.seq) / 86400)
    assert days == pytest.approx(DAYS_OF_300_BILLION_TOKENS, abs=1.0)
    assert days == pytest.approx([84.7, 43.5, 23.0, 156.1, 79.9, 42.0], abs=0.06)


@pytest.mark.parametrize(
    ("gpus", "batch", "printed"),
    [
        (32, 32, "0.97 0.94 0.88 0.75 0.50 0.00"),
        (32, 128, "0.24 0.23 0.22 0.19 0.13 0.00"),
        (128, 128, "0.99 0.98 0.97 0.94 0.88 0.75 0.50"),
        (128, 512, "0.25 0.25 0.24 0.23 0.22 0.19 0.13"),
    ],
)
def test_figure_6_of_2021(gpus: int, batch: int, printed: str) -> None:
    """The bubble of n / d pipeline ranks with b′ / d microbatches each; the walk idles as long."""
    for power, value in enumerate(printed.split()):
        dp = 2**power
        pp, microbatches = gpus // dp, batch // dp
        bubble = ideal_bubble("1f1b", pp, 1, microbatches)
        assert bubble == pytest.approx(float(value), abs=0.0051)
        (walked,) = makespan_seconds(order_of(pp, 1, microbatches), np.ones((1, pp)), 2 * np.ones((1, pp)))
        assert walked / (3 * microbatches) - 1 == pytest.approx(bubble, rel=1e-12)


@pytest.mark.parametrize(
    ("batch", "printed"), [(128, [1.00, 1.09, 1.09, 0.95, 0.75]), (512, [1.00, 1.13, 1.21, 1.19, 1.11])]
)
def test_figure_8_of_2021_from_figure_7(batch: int, printed: list[float]) -> None:
    """Eight stages whose time per sequence is that of Figure 7, at t = p = 8 (Equation 1), walked.

    Figure 7 is printed to a TFLOP/s, Figure 8 to a hundredth.
    """
    rates = []
    for micro_batch, tflops in FIGURE_7.items():
        forward = np.full((1, 8), micro_batch / tflops)
        order = order_of(8, 1, batch // micro_batch)
        rates.append(1 / float(makespan_seconds(order, forward, 2 * forward)[0]))
    for rate, tflops, value in zip(rates, FIGURE_7.values(), printed, strict=True):
        relative = rate / rates[0]
        assert relative == pytest.approx(value, abs=0.005 + relative * (0.5 / tflops + 0.5 / FIGURE_7[1]))


@pytest.mark.parametrize(
    ("interleaved", "chunks", "printed", "constant", "spread"),
    [(False, 1, [82, 109, 122, 130, 135], 158.5, 2.0), (True, 4, [119, 134, 141, 143, 146], 150.0, 4.0)],
)
def test_figure_12_of_2021_is_its_bubble(
    interleaved: bool, chunks: int, printed: list[int], constant: float, spread: float
) -> None:
    """TFLOP/s × (1 + 11 / (v·m)) does not depend on the batch."""
    name = "interleaved" if interleaved else "1f1b"
    without = [value * (1 + ideal_bubble(name, 12, chunks, 12 * n)) for n, value in enumerate(printed, 1)]
    assert without == pytest.approx([constant] * 5, abs=spread)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "gpus", "tflops", "batch", "tokens", "days"),
    [(96, 12288, 96, 1024, 140, 1536, 300e9, 34), (128, 25600, 160, 3072, 163, 3072, 450e9, 84)],
)
def test_days_to_train_gpt_3_and_a_trillion(
    layers: int, hidden: int, heads: int, gpus: int, tflops: float, batch: int, tokens: float, days: int
) -> None:
    """2021 paper, Section 5.1: 8·T·P / (n·X)."""
    workload = Workload(gpus, batch, 1, hidden, heads, layers, 2048, 1, gpus, 1)
    assert 8 * tokens * equation_2(workload) / (gpus * tflops * 1e12) / 86400 == pytest.approx(days, abs=0.5)


def test_activation_memory_formulas() -> None:
    """Korthikanti et al. 2022, Table 2 and Section 4: GPT-3's attention term 5as/h is 80, MT-NLG's 64."""
    for layers, hidden, heads, attention, saved in ((96, 12288, 96, 80, 0.70), (105, 20480, 128, 64, 0.65)):
        model = checked_config(Workload(8, 8, 1, hidden, heads, layers, 2048, 8, 1, 1)).model
        unit = 2048 * hidden
        assert 5 * heads * 2048 / hidden == attention
        none, selective, full = (
            activation_bytes_per_layer(model, 1, ParallelConfig(recompute=mode)) / unit
            for mode in ("none", "selective", "full")
        )
        assert (none, selective, full) == (34 + attention, 34, 2)
        assert attention / none == pytest.approx(saved, abs=0.005)
        assert activation_bytes_per_layer(model, 1, ParallelConfig(tp=8)) / unit == 10 + 24 / 8 + attention / 8
