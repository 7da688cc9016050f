"""What the papers' tables say of themselves, to the digits they print, from this project's closed
forms."""

import numpy as np
import pytest

from mlm_repro.engine.costs import flops_per_iteration, parameter_count
from mlm_repro.engine.pipeline.schedule import ideal_bubble
from mlm_repro.experiments.catalogue import find_experiment, read_rows
from mlm_repro.experiments.published import HERE, published_rows
from mlm_repro.experiments.simulator.measurements import workload_of
from mlm_repro.experiments.simulator.simulate import makespan, order_of
from mlm_repro.experiments.simulator.workload import Workload, checked_config

RUNS = [
    row for name in ("ptd-p-runs.csv", "megatron-2019-runs.csv") for row in read_rows(HERE / name)
]


def printed(name: str, quantity: str) -> list[tuple[Workload, float]]:
    """The workloads of an experiment's first part, each with what is published of it."""
    experiment = find_experiment(name)
    return [
        (workload_of(row), float(row[quantity]))
        for row in published_rows(experiment, experiment.parts[0])
    ]


def equation_2(w: Workload) -> float:
    """2021 paper: parameters."""
    h, layers = w.hidden, w.layers
    return 12 * layers * h * h * (1 + 13 / (12 * h) + (w.vocab + w.seq) / (12 * layers * h))


def matmul_flops(w: Workload) -> float:
    """Counted product by product, with the layers' forward pass done twice."""
    tokens, h = w.global_batch * w.seq, w.hidden
    linears = sum(
        2 * tokens * rows * columns
        for rows, columns in ((h, 3 * h), (h, h), (h, 4 * h), (4 * h, h))
    )
    attention = 2 * (2 * w.global_batch * w.seq * w.seq * h)
    return 4 * w.layers * (linears + attention) + 3 * (2 * tokens * h * w.vocab)


@pytest.mark.parametrize(
    "row", RUNS, ids=lambda row: f"{row['experiment']} {row['series']} {row['gpus']}"
)
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
        assert round(parameter_count(unpadded) / 1e9, digits) == pytest.approx(
            float(printed), abs=10**-digits / 10
        )


def test_figure_6_of_2021() -> None:
    """The bubble of n / d pipeline ranks with b′ / d microbatches each; the walk idles as long."""
    for workload, value in printed("2021/figure-6", "bubble_fraction"):
        pp, microbatches = workload.pp, workload.microbatches
        bubble = ideal_bubble("1f1b", pp, 1, microbatches)
        assert bubble == pytest.approx(value, abs=0.0051)
        (walked,) = makespan()(
            order_of(pp, 1, microbatches), np.ones((1, pp)), 2 * np.ones((1, pp))
        )
        assert walked / (3 * microbatches) - 1 == pytest.approx(bubble, rel=1e-12)


def test_figure_8_of_2021_from_figure_7() -> None:
    """Eight stages whose time per sequence is that of Figure 7, at t = p = 8 (Equation 1), walked.

    Figure 7 is printed to a TFLOP/s, Figure 8 to a hundredth.
    """
    tflops = {
        workload.micro_batch: value
        for workload, value in printed("2021/figure-7", "tflops_per_gpu")
    }

    def rate(batch: int, micro_batch: int) -> float:
        forward = np.full((1, 8), micro_batch / tflops[micro_batch])
        return 1 / float(makespan()(order_of(8, 1, batch // micro_batch), forward, 2 * forward)[0])

    for workload, value in printed("2021/figure-8", "relative_throughput"):
        relative = rate(workload.global_batch, workload.micro_batch) / rate(
            workload.global_batch, 1
        )
        rounding = 0.5 / tflops[workload.micro_batch] + 0.5 / tflops[1]
        assert relative == pytest.approx(value, abs=0.005 + relative * rounding)


@pytest.mark.parametrize(("chunks", "constant", "spread"), [(1, 158.5, 2.0), (4, 150.0, 4.0)])
def test_figure_12_of_2021_is_its_bubble(chunks: int, constant: float, spread: float) -> None:
    """TFLOP/s × (1 + 11 / (v·m)) does not depend on the batch."""
    name = "interleaved" if chunks > 1 else "1f1b"
    without = [
        value * (1 + ideal_bubble(name, workload.pp, chunks, workload.microbatches))
        for workload, value in printed("2021/figure-12", "tflops_per_gpu")
        if workload.chunks == chunks
    ]
    assert without == pytest.approx([constant] * 5, abs=spread)
