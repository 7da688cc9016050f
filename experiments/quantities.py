"""Published quantities, computed from predicted times or in closed form from a workload's row.
Imports no torch."""

import math
from collections.abc import Callable

from mlm_repro.engine.config import ModelConfig
from mlm_repro.engine.costs import MEGATRON_BYTES, flops_per_iteration, parameter_count
from mlm_repro.engine.pipeline.schedule import ideal_bubble
from mlm_repro.experiments.catalogue import every_claim
from mlm_repro.experiments.published import Row, published_value
from mlm_repro.experiments.ranges import Range
from mlm_repro.experiments.simulator.cluster import ErrorInterval, Machine
from mlm_repro.experiments.simulator.compute import layer_passes
from mlm_repro.experiments.simulator.measurements import (
    PEAK_TFLOPS,
    QUANTITIES,
    RATIOS,
    Simulated,
    workload_of,
)
from mlm_repro.experiments.simulator.simulate import Prediction
from mlm_repro.experiments.simulator.workload import Workload, Workloads, checked_config, flops_of
from mlm_repro.lineage.atomic import JSON

TABLE_2_TOKENS = 300e9
"""Number of training tokens in the 2021 paper's Table 2."""


def simulated_values(
    name: str, row: Simulated, prediction: Prediction, ratio: ErrorInterval | None
) -> JSON:
    """Return a dict with fields of a record, `quantity`, `kind`, `value`, `low` and `high`, for the
    quantity `name`, a key of `QUANTITIES`, of the simulated workload `row`. The value follows from
    the row's seconds, `low` and `high` from the low and the high seconds of `prediction`.

    For a quantity of `RATIOS`, relative to the first workload, `ratio` gives `low` and `high` if it
    is not None: value / ratio.high and value / ratio.low. The first workload itself has no `low`
    and `high` for it.
    """
    point, *ends = (
        QUANTITIES[name](row._replace(seconds=seconds))
        for seconds in (row.seconds, prediction.low_seconds, prediction.high_seconds)
    )
    values = {"quantity": name, "kind": "simulated", "value": point}
    if name in RATIOS and row.workload == row.first:
        return values
    if name in RATIOS and ratio:
        ends = [point / ratio.high, point / ratio.low]
    return values | {"low": min(ends), "high": max(ends)}


def layer_values(
    name: str, machine: Machine, workload: Workload, first: Workload, interval: ErrorInterval
) -> JSON:
    """Return a dict with fields of a record, `quantity`, `kind`, `value`, `low` and `high`, for the
    quantity `name` of one layer, one of `LAYER`, simulated: milliseconds of the layer's forward or
    its backward pass, or the percentage by which both passes together take longer than those of
    `first`, a workload. `low` and `high` are the value with the layer's time multiplied by the ends
    of `interval`."""
    forward, backward = layer_passes(machine, Workloads.of([workload]))
    first_forward, first_backward = layer_passes(machine, Workloads.of([first]))
    total = float((forward + backward)[0])
    alone = float((first_forward + first_backward)[0])

    def value(factor: float) -> float:
        return {
            "forward_milliseconds": 1e3 * float(forward[0]) * factor,
            "backward_milliseconds": 1e3 * float(backward[0]) * factor,
            "overhead_percent": 100 * (total * factor / alone - 1),
        }[name]

    point, low, high = map(value, (1.0, interval.low, interval.high))
    return {"quantity": name, "kind": "simulated", "value": point, "low": low, "high": high}


LAYER = ("forward_milliseconds", "backward_milliseconds", "overhead_percent")
"""Names of the simulated quantities of one layer, which `layer_values` gives."""


def _training_days(row: Row, first: Row) -> Range:
    workload = workload_of(row)
    iterations = TABLE_2_TOKENS / (workload.global_batch * workload.seq)
    return (
        flops_of(workload)
        * iterations
        / (workload.gpus * published_value(row, "tflops_per_gpu") * 1e12)
        / 86400
    )


def _training_days_equation_4(row: Row, first: Row) -> Range:
    parameters = parameter_count(checked_config(workload_of(row)).model)
    flops_per_second = int(row["gpus"]) * published_value(row, "tflops_per_gpu") * 1e12
    return 8 * float(row["tokens"]) * parameters / flops_per_second / 86400


def _utilisation(row: Row, again: float) -> Range:
    """Return, as a Range, the percentage of the peak FLOP/s of its GPUs that the published row
    `row` reaches (2022 paper, Equation 7). `again` · Bs²h further operations a layer are counted
    for recomputed attention; 0 counts none. Raises BadInput if a cell of the row is not valid, the
    engine refuses the workload, or no claim states the seconds of its iteration."""
    w = workload_of(row)
    config = checked_config(w)
    flops = flops_per_iteration(config.model, config.train, recompute=False)
    flops += again * w.global_batch * w.seq**2 * w.hidden * w.layers
    peak = w.gpus * PEAK_TFLOPS[row["cluster"]] * 1e12
    return 100 * flops / (peak * published_value(row, "iteration_seconds"))


def _extra_activations(row: Row, first: Row) -> float:
    """Return, as a float, the activations of the first pipeline stage outside its layers, as a
    percentage of all activations there, for the workload in `row` (2022 paper, Section 4.3).
    `first` is not used."""
    w = workload_of(row)
    extra = w.pp / w.layers + (4 / w.layers * (1 + w.vocab / w.hidden) if w.pp == 1 else 0.0)
    return 100 * extra / (34 + 5 * w.heads * w.seq / w.hidden + extra)


def bert_of(row: Row) -> ModelConfig:
    """Return the ModelConfig of a BERT with the shape of a row of workloads; the vocabulary is not
    padded."""
    workload = workload_of(row)
    return ModelConfig(
        family="bert",
        num_layers=workload.layers,
        hidden_size=workload.hidden,
        num_heads=workload.heads,
        seq_length=workload.seq,
        vocab_size=workload.vocab,
        padded_vocab_size=workload.vocab,
    )


def _bubble_share(row: Row, first: Row) -> float:
    to_ideal = ideal_bubble("gpipe", int(row["pp"]), 1, int(row["microbatches"]))
    return to_ideal / (1 + to_ideal)


def _state_gigabytes(row: Row, first: Row) -> float:
    """Return, as a float, the gigabytes (10⁹ bytes) of parameters, gradients and optimizer state on
    a rank, from three values of the dict `row`: `parameters`, the whole model's, `gpus`, its ranks,
    which are all data-parallel, and `stage`, of ZeRO. `first` is not used.

    As in MEGATRON_BYTES, a parameter takes 2 bytes, its gradient 2 and its optimizer state, two
    moments and a copy, 12. ZeRO stage 1 divides the optimizer state over the ranks, stage 2 also
    gradients, stage 3 also parameters; stage 0 divides nothing.
    """
    stage = int(row["stage"])
    ranks = int(row["gpus"])
    element = MEGATRON_BYTES
    parts = ((element.weight, 3), (element.gradient, 2), (element.moments + element.master, 1))
    return (
        float(row["parameters"])
        / 1e9
        * sum(size / (ranks if stage >= divides else 1) for size, divides in parts)
    )


def _relative_throughput(row: Row, first: Row) -> Range | float:
    figure_7 = {
        claim.x: claim.printed for claim in every_claim() if claim.id.startswith("2021/figure-7/")
    }

    def seconds(claim: Row) -> Range:
        workload = workload_of(claim)
        return (
            (workload.microbatches + workload.pp - 1)
            * workload.micro_batch
            / figure_7[workload.micro_batch]
        )

    return 1.0 if row is first else seconds(first) / seconds(row)


FORMULAS: dict[str, Callable[[Row, Row], Range | float]] = {
    "parameters": lambda row, first: parameter_count(checked_config(workload_of(row)).model) / 1e9,
    "bert_parameters": lambda row, first: parameter_count(bert_of(row)) / 1e9,
    "percent_of_peak": lambda row, first: (
        100 * published_value(row, "tflops_per_gpu") / PEAK_TFLOPS[row["cluster"]]
    ),
    "aggregate_petaflops": lambda row, first: (
        published_value(row, "tflops_per_gpu") * int(row["gpus"]) / 1e3
    ),
    "training_days": _training_days,  # 2021 paper, Equation 3 over its throughput
    "training_days_equation_4": _training_days_equation_4,
    "model_flops_utilisation": lambda row, first: _utilisation(row, 0),  # 2022 paper, Equation 7
    "hardware_flops_utilisation": lambda row, first: _utilisation(
        row, 4
    ),  # 2022 paper, what Appendix A names
    "extra_activation_percent": _extra_activations,
    # 2022 paper, Appendix B: sbhp elements of 2 bytes
    "output_deallocation_gigabytes": lambda row, first: (
        2 * math.prod(int(row[name]) for name in ("seq", "micro_batch", "hidden", "pp")) / 2**30
    ),
    "bubble_fraction": lambda row, first: ideal_bubble(
        "1f1b", int(row["pp"]), 1, workload_of(row).microbatches
    ),
    "relative_throughput": _relative_throughput,  # 2021 paper, Equation 1 on Figure 7
    "bubble_share": _bubble_share,  # GPipe, Section 2.3
    "state_gigabytes": _state_gigabytes,  # ZeRO, Section 3.1 and Table 1
    "communication_ratio": lambda row, first: (
        (2 + (row["stage"] == "3")) / 2
    ),  # ZeRO, Section 7: Ψ + Ψ, and Ψ again
    "activation_gigabytes": lambda row, first: (  # ZeRO, Section 3.2
        2
        * 12
        * math.prod(int(row[name]) for name in ("hidden", "global_batch", "seq", "layers"))
        / 1e9
    ),
}
"""Functions that return a quantity in closed form, a float or a Range, by the quantity's name. Each
takes a row of `published_rows` and the first such row of its series."""
