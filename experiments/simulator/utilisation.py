"""Rates of training turned into each other, with every convention that they are quoted in. Imports no torch."""

from typing import NamedTuple

from engine.costs import flops_per_token
from experiments.simulator.cluster import Cluster
from experiments.simulator.planner import PlannedModel
from experiments.simulator.workload import flops_of, layer_parameters
from lineage.errors import BadInput


class Given(NamedTuple):
    """A measured rate: one of the last three, on this many GPUs and sequences."""

    gpus: int
    batch: int
    tokens_per_second: float | None = None
    milliseconds: float | None = None
    tflops: float | None = None


class Flops(NamedTuple):
    """Operations of a token's products, forward and backward."""

    parameters: float
    """6 of each parameter that multiplies."""
    attention: float
    """Attention of every position to every other: 12 × layers × hidden × sequence."""
    again: float
    """Second forward pass of the layers."""


def token_flops(model: PlannedModel) -> Flops:
    """FLOPs of a token, for a GPT-2 by the engine's closed forms. Raises BadInput for a BERT or Transformer-XL."""
    w = model.template
    if model.run:
        config = model.run.model
        if config.family != "gpt2":
            raise BadInput(f"{model.name} is a {config.family}: utilisation is stated for gpt2 and llama")
        whole, causal = flops_per_token(config), flops_per_token(config, causal=True)
        return Flops(2 * causal - whole, 2 * (whole - causal), flops_per_token(config, recompute=True) - whole)
    attention = 12.0 * w.layers * w.hidden * w.seq
    again = w.layers * 2 * (layer_parameters(w) - 2 * w.hidden) + attention / 3
    return Flops(flops_of(w) / (w.global_batch * w.seq) - attention, attention, again)


def utilisation(model: PlannedModel, cluster: Cluster, given: Given) -> str:
    """The given rate turned into all others. Raises BadInput unless exactly one is given, above 0."""
    stated = [value for value in given[2:] if value is not None]
    if len(stated) != 1 or stated[0] <= 0:
        raise BadInput("give one of --tokens-per-second, --milliseconds and --tflops, above 0")
    flops, tokens = token_flops(model), given.batch * model.template.seq
    whole = flops.parameters + flops.attention
    if given.tflops:
        rate = given.tflops * 1e12 * given.gpus / whole
    else:
        rate = given.tokens_per_second or 1e3 * tokens / (given.milliseconds or 1.0)
    peak = cluster.constants.matmul_flops_per_second
    conventions = {"attention whole": whole, "attention causal (half)": whole - flops.attention / 2,
                   "whole, layers computed again": whole + flops.again}  # fmt: skip
    lines = [
        f"{model.name}: 6 × {flops.parameters / 6:,.0f} parameters that multiply, 12 × layers × hidden × sequence = "
        f"{flops.attention:,.0f} of attention a token",
        f"{rate:,.1f} tokens/s = {rate / given.gpus:,.1f} a GPU; {1e3 * tokens / rate:,.1f} ms for "
        f"{given.batch} × {model.template.seq:,} tokens on {given.gpus:,} GPUs",
        f"dense peak, without sparsity, {peak.value / 1e12:g} TFLOP/s a GPU ({peak.source})",
        "utilisation = FLOPs a token × tokens/s / (GPUs × peak)",
        f"{'':<30}{'GFLOP a token':>15}{'TFLOP/s a GPU':>15}{'of peak':>9}",
    ]
    for name, each in conventions.items():
        reached = each * rate / given.gpus
        lines.append(f"{name:<30}{each / 1e9:>15.4g}{reached / 1e12:>15.4g}{reached / peak.value:>9.1%}")
    return "\n".join(lines)
