"""Layouts of a model on a cluster, ranked by the simulator. Imports no torch."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.config import RunConfig
from engine.costs import parameter_count, tokens_trained
from experiments.simulator.cluster import Cluster
from experiments.simulator.measurements import ITERATIONS_PER_EPOCH
from experiments.simulator.simulate import Prediction, simulate
from experiments.simulator.workload import Workload
from lineage.errors import HardwareMissing
from lineage.progress import announce

EPOCH_TOKENS = ITERATIONS_PER_EPOCH * 512 * 1024
"""The 2019 paper's epoch at its batch and context."""
MOST_CHUNKS = 8
LARGEST_MICRO_BATCH = 64
SHOWN = 10


class Choice(NamedTuple):
    """A layout that runs, and what it takes."""

    workload: Workload
    prediction: Prediction


def ranked_layouts(config: RunConfig, cluster: Cluster, gpus: int) -> list[Choice]:
    """Every layout that divides and fits, fastest first; batch and model are the run's.

    Raises HardwareMissing with a reason where none does.
    """
    workloads = list(possible_layouts(config, cluster, gpus))
    announce(f"predicts {len(workloads):,} layouts")
    predictions = simulate(cluster, workloads, config)
    choices = [Choice(*pair) for pair in zip(workloads, predictions, strict=True) if not pair[1].reason]
    if not choices:
        why = f"; of one, {predictions[-1].reason}" if predictions else ": none divides the batch and model"
        raise HardwareMissing(f"no layout of {config.name} on {gpus} GPUs can run{why}")
    return sorted(choices, key=lambda choice: choice.prediction.seconds)


def possible_layouts(config: RunConfig, cluster: Cluster, gpus: int) -> Iterator[Workload]:
    """Layouts in which everything divides evenly and tensor parallelism stays in a node (2021 paper, Takeaway 1)."""
    model, batch = config.model, config.train.global_batch_size
    for tp in _divisors(gpus, int(cluster.constants.gpus_per_node.value)):
        if model.num_heads % tp:
            continue
        for pp in _divisors(gpus // tp, model.num_layers):
            dp = gpus // (tp * pp)
            if model.num_layers % pp or batch % dp:
                continue
            for micro_batch in _divisors(batch // dp, LARGEST_MICRO_BATCH):
                for chunks in range(1, MOST_CHUNKS + 1 if pp > 1 else 2):
                    if model.num_layers % (pp * chunks) or (chunks > 1 and batch // (dp * micro_batch) % pp):
                        continue
                    for recompute in ("none", "selective", "full"):
                        yield Workload(
                            gpus, batch, micro_batch, model.hidden_size, model.num_heads, model.num_layers,
                            model.seq_length, tp, dp, pp, model.padded_vocab_size, chunks, recompute,
                        )  # fmt: skip


def format_plan(config: RunConfig, cluster: Cluster, choices: Sequence[Choice]) -> str:
    """The fastest layouts as a table, with what the whole run takes; every number in it is simulated."""
    gpus = choices[0].workload.gpus
    tokens = tokens_trained(config.model, config.train)
    per_iteration = config.train.global_batch_size * config.model.seq_length
    lines = [
        f"{config.name}: {parameter_count(config.model):,} parameters, {tokens:,} tokens in batches of "
        f"{config.train.global_batch_size}, on {gpus} of {cluster.title}",
        f"simulated, with 90 % intervals ({_interval_source(cluster, gpus)}); an epoch is {EPOCH_TOKENS / 1e9:.1f} "
        "billion tokens (2019 paper)",
        f"memory is that of this engine's fullest rank in {cluster.precision}, as --dry-run has it; TFLOP/s count the "
        "whole of attention and layers that are computed again (2021 paper, Equation 3); times are those of a GPT-2",
        f"{'tp':>3}{'pp':>4}{'dp':>5}{'micro':>7}{'chunks':>8}  {'recompute':<10}{'s/iteration':>12}{'90 %':>17}"
        f"{'TFLOP/s/GPU':>13}{'GiB':>7}{'bytes':>16}{'days/epoch':>12}{'days':>9}{'GPU-hours':>12}",
    ]
    for w, p in choices[:SHOWN]:
        run_seconds = p.seconds * tokens / per_iteration
        lines.append(
            f"{w.tp:>3}{w.pp:>4}{w.dp:>5}{w.micro_batch:>7}{w.chunks:>8}  {w.recompute:<10}{p.seconds:>12.4g}"
            f"{f'{p.low_seconds:.4g} to {p.high_seconds:.4g}':>17}{p.tflops_per_gpu:>13.3g}"
            f"{p.memory_bytes / 2**30:>7.1f}{p.memory_bytes:>16,}"
            f"{p.seconds * EPOCH_TOKENS / per_iteration / 86400:>12.3g}{run_seconds / 86400:>9.3g}"
            f"{run_seconds / 3600 * gpus:>12,.0f}"
        )
    if len(choices) > SHOWN:
        lines.append(f"and {len(choices) - SHOWN} slower layouts that fit")
    return "\n".join(lines)


def _interval_source(cluster: Cluster, gpus: int) -> str:
    one_node = gpus <= cluster.constants.gpus_per_node.value
    return (cluster.intervals.one_node if one_node else cluster.intervals.several_nodes).source


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]
