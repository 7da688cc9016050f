"""Layouts of a model on a cluster, ranked by the simulator. Imports no torch."""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.costs import written_bytes
from mlm_repro.engine.pipeline.schedule import ideal_bubble
from mlm_repro.engine.run.resolved import ResolvedRun, read_run
from mlm_repro.experiments.simulator.cluster import Cluster, machine_of
from mlm_repro.experiments.simulator.goodput import Failures
from mlm_repro.experiments.simulator.measurements import fitted_workloads
from mlm_repro.experiments.simulator.simulate import Prediction, iteration_parts, simulate
from mlm_repro.experiments.simulator.workload import (
    NOT_COSTED,
    NotCosted,
    Workload,
    checked_config,
    flops_of,
)
from mlm_repro.lineage.errors import BadInput, HardwareMissing
from mlm_repro.lineage.progress import announce

MOST_CHUNKS = 8
LARGEST_MICRO_BATCH = 64
MOST_UNEVEN = 1.1
"""Largest allowed ratio of the fullest stage's layers to the mean."""
SHOWN = 10
OWN = "this-engine"
"""Name of the software that plans are made for by default, this engine's."""
RECOMPUTE = ("none", "selective", "full")
SERIAL = ("train.microbatch_size=1", "parallel.tp=1", "parallel.pp=1", "parallel.chunks=1")
"""Overrides that reset the model's own layout, because a requested batch need not divide over
it."""


class Choice(NamedTuple):
    """A `workload` on one layout, and its `prediction`, of time and memory. The prediction's
    `reason` says why the workload cannot run or does not fit into memory, and is empty if it can
    run and fits. If the workload cannot run, the prediction's numbers are 0."""

    workload: Workload
    prediction: Prediction


def read_model(model: str, overrides: Sequence[str] = ()) -> ResolvedRun:
    """Return the ResolvedRun of a shipped model's name or a TOML file. Its microbatch size, tp, pp
    and chunks are set to 1 before the overrides, texts KEY=VALUE. Raises NotCosted for a
    JSON file, which describes another program's model, and for a llama by name, and the errors of
    `read_run`, such as BadInput for an unknown or unfit model and DataMissing for a dataset that
    it names."""
    if model.endswith(".json"):
        raise NotCosted(
            f"{model} describes another program's model, which the simulator does not cost: name a"
            " shipped model or a TOML file"
        )
    if "llama" in model.lower() and not Path(model).is_file():
        raise NotCosted(f"{model} is a llama by its name: name another model, as {NOT_COSTED}")
    try:
        return read_run(model, [*SERIAL, *overrides])
    except BadInput as error:
        # Without the keys that nobody asked for.
        raise BadInput(str(error).replace(" --set ".join(["", *SERIAL]), "")) from error


def ranked_layouts(run: ResolvedRun, cluster: Cluster, gpus: int) -> list[Choice]:
    """Simulate every layout that `possible_layouts` yields for a run's model on `gpus` GPUs of the
    cluster, and return a list of a Choice, the workload and its prediction, for each that can run
    and fits into memory; the batch is the run's. The order is by `expected_seconds`, least first:
    an iteration's seconds divided by the probability that the layout fits, so that the first need
    not be the fastest.

    Raises HardwareMissing with a reason if no layout can run and fits into memory.
    """
    template = Workload.of_run(run.config, 1)
    workloads = list(possible_layouts(template, cluster, gpus))
    announce(f"predicts {len(workloads):,} layouts")
    predictions = simulate(cluster, workloads, run.config, only_fitting=True)
    tried = [*map(Choice, workloads, predictions)]
    choices = [choice for choice in tried if not choice.prediction.reason]
    if not choices:
        short = [choice for choice in tried if choice.prediction.memory_bytes]
        why = _smallest(cluster, short) if short else _nearest(template, cluster, gpus)
        raise HardwareMissing(f"no layout of {run.config.name} on {gpus} GPUs can run{why}")
    return sorted(choices, key=expected_seconds)


def expected_seconds(choice: Choice) -> float:
    """Return the predicted seconds of an iteration in the layout of `choice`, a Choice, divided by
    the probability that the layout fits into memory, both from its `prediction`. Layouts are ranked
    by it; less is better. The layout must be one that can run: the prediction of any other, which
    has a `reason`, may lack time and probability."""
    return choice.prediction.seconds / choice.prediction.probability_fits


def possible_layouts(template: Workload, cluster: Cluster, gpus: int) -> Iterator[Workload]:
    """Yield a copy of the Workload `template` for each combination of a layout over `gpus` GPUs, a
    microbatch of at most 64 sequences, at most 8 chunks, a recomputation and a ZeRO stage in which
    tensor parallelism stays in a node (2021 paper, Takeaway 1) and everything divides evenly. Only
    with one chunk may the stages' numbers of layers differ a little. Memory is not looked at.

    If the cluster fuses attention, selective recomputation is left out, sequence parallelism is on
    where it divides, and with several data-parallel ranks ZeRO stage 1 is tried beside stage 0. If
    the cluster does not fuse attention, sequence parallelism is off and the ZeRO stage is 0.
    """
    t = template
    is_modern = cluster.constants.fused_attention.value == 1
    modes = ("none", "full") if is_modern else RECOMPUTE
    for tp in _divisors(gpus, int(cluster.constants.gpus_per_node.value)):
        if t.heads % tp or t.inner % tp:
            continue
        for pp in _divisors(gpus // tp, t.layers):
            dp = gpus // (tp * pp)
            if t.global_batch % dp or -(-t.layers // pp) * pp > MOST_UNEVEN * t.layers:
                continue
            for micro_batch in _divisors(t.global_batch // dp, LARGEST_MICRO_BATCH):
                for chunks in range(1, MOST_CHUNKS + 1 if pp > 1 else 2):
                    if chunks > 1 and (
                        t.layers % (pp * chunks) or t.global_batch // (dp * micro_batch) % pp
                    ):
                        continue
                    for mode, zero in product(modes, range(1 + (dp > 1 and is_modern))):
                        yield t._replace(
                            gpus=gpus,
                            micro_batch=micro_batch,
                            tp=tp,
                            dp=dp,
                            pp=pp,
                            chunks=chunks,
                            recompute=mode,
                            zero=zero,
                            sequence_parallel=int(is_modern and tp > 1 and t.seq % tp == 0),
                        )


def _smallest(cluster: Cluster, choices: Sequence[Choice]) -> str:
    """Return the end of a sentence, from a colon on, that names the layout that needs the least
    memory among `choices`, at least one, which all lack memory; how much a GPU lacks for it; and
    the reason in its prediction."""
    w, prediction = min(choices, key=lambda choice: choice.prediction.memory_bytes)
    lacking = (prediction.memory_bytes - cluster.constants.memory_bytes.value) / 2**30
    layout = (
        f"tp {w.tp} × pp {w.pp} × dp {w.dp}, microbatches of {w.micro_batch}, zero {w.zero},"
        f" recompute {w.recompute}"
    )
    return f": the smallest, {layout}, lacks {lacking:.1f} GiB; {prediction.reason}"


def planned_run(run: ResolvedRun, cluster: Cluster, choice: Choice) -> RunConfig:
    """Return the RunConfig of `run` with the workload of `choice`, as `mlm-train`, its
    `to-megatron` and a job take it. The workload gives the layers, hidden size, heads and sequence
    length, the batch and microbatch, and all settings of `parallel` but `recompute_layers`, such as
    the layout, the schedule and the ZeRO stage; the precision is the cluster's, all else is
    `run`'s. Raises the errors of `checked_config`."""
    return checked_config(choice.workload, cluster.precision, run.config)


def goodput(run: ResolvedRun, cluster: Cluster, choice: Choice, seconds: float) -> str:
    """Return a sentence on how long a training in the chosen layout takes with failures, and in how
    many attempts, if it takes `seconds` without failures. The rates of failures and of writing and
    the time of a restart are the defaults of `Failures.of`; checkpoints are written at the best
    interval."""
    w = choice.workload
    config = planned_run(run, cluster, choice)
    failures = Failures.of(
        w.gpus, written_bytes(config.model, config.train.precision, config.parallel, w.dp)
    )
    share = failures.share(failures.best_interval)
    return (
        f"failures: {failures.describe(failures.best_interval)}, {seconds / share / 86400:.3g} days"
        f" in {1 + seconds / share / failures.mean:,.1f} attempts (rate of arXiv:2407.21783,"
        " Section 3.3.4)"
    )


def _nearest(template: Workload, cluster: Cluster, gpus: int) -> str:
    """Return the end of a sentence, from a colon on, that says that no layout of the Workload
    `template` divides over `gpus` GPUs of the cluster, and names the next smaller number of GPUs
    that such a layout divides over, and the next larger one below 4 × `gpus`, if there is one."""
    below, above = (
        next((n for n in numbers if next(possible_layouts(template, cluster, n), None)), None)
        for numbers in (range(gpus - 1, 0, -1), range(gpus + 1, 4 * gpus))
    )
    return (
        f": none divides the batch and model; on {' or '.join(str(n) for n in (below, above) if n)}"
        " one does"
    )


def reasons(choices: Sequence[Choice]) -> str:
    """Return as one line, for each of tp, pp, recompute, zero and micro_batch, its value in the
    first of `choices` and in the next of them that has another value, with the latter's
    `expected_seconds` divided by the first's, or that no other value fits. `choices` has at least
    one Choice and the order of `ranked_layouts`, best first."""
    first = choices[0]
    comparisons = []
    for name in ("tp", "pp", "recompute", "zero", "micro_batch"):
        own = getattr(first.workload, name)
        other = next((choice for choice in choices if getattr(choice.workload, name) != own), None)
        if other:
            times = expected_seconds(other) / expected_seconds(first)
            comparisons.append(f"{name} {own}: {getattr(other.workload, name)} takes {times:.2f} ×")
        else:
            comparisons.append(f"{name} {own}: no other fits")
    return f"why the first: {'; '.join(comparisons)}"


def explain(cluster: Cluster, choice: Choice) -> str:
    """Return a text with a line for each part of an iteration's time in the layout `choice`,
    seconds and share, the largest first, without parts that take none. Its heading calls the layout
    the first one. Every number is simulated; the bubble is its closed form.

    Tensor-parallel communication is the time that the iteration would save if this communication
    were free.
    """
    machine = machine_of(cluster)
    w = choice.workload
    parts = iteration_parts(machine, [w])
    silent = machine.replaced(
        collective_slowdown=0.0, host_collective_seconds=0.0, tensor_step_seconds=0.0
    )
    bubble = ideal_bubble("interleaved" if w.chunks > 1 else "1f1b", w.pp, w.chunks, w.microbatches)
    shares = {
        "tensor-parallel communication": parts.pipeline - iteration_parts(silent, [w]).pipeline,
        "pipeline bubble": parts.pipeline * bubble / (1 + bubble),
        "optimizer": parts.optimizer,
        "data-parallel communication": parts.gradients,
        "host, between iterations": parts.host,
    }
    shares["computation, and messages between stages"] = parts.total - sum(shares.values())
    lines = [
        f"  {name:<40}{seconds[0]:>10.4g} s {seconds[0] / parts.total[0]:>7.1%}"
        for name, seconds in sorted(shares.items(), key=lambda share: -share[1][0])
        if seconds[0] > 0
    ]
    return "\n".join([f"where the {parts.total[0]:.4g} s of the first layout go", *lines])


def format_plan(
    run: ResolvedRun,
    cluster: Cluster,
    choices: Sequence[Choice],
    price: float,
    days: float,
) -> str:
    """Return a text on the first ten (`SHOWN`) of `choices`, which are in the order of
    `ranked_layouts` and not empty: a table with the time of the whole run, and a line on failures;
    every number is simulated.

    `price`, of a GPU-hour, adds a column with the cost; `days` adds a line with the tokens that the
    first layout trains in that number of days. A `price` or `days` of 0 adds nothing.
    """
    model = run.config.model
    first = choices[0]
    gpus = first.workload.gpus
    iteration_seconds = first.prediction.seconds
    batch = run.config.train.global_batch_size
    per_iteration = batch * model.seq_length
    peak = cluster.constants.matmul_flops_per_second.value
    beyond = first.prediction.extrapolated
    interval = cluster.interval(gpus, beyond)
    known = fitted_workloads(cluster.software)
    fitted = sum(choice.workload in known for choice in choices)
    scored = tried = stores = ""
    if interval.score:
        scored = (
            f" (score {interval.score:.2f}, of one share of the peak {interval.baseline:.2f}; less"
            " is better)"
        )
    if interval.coverage is not None:
        tried = f", which held {interval.coverage:.0%} of them{scored},"
    if cluster.constants.fused_attention.value:
        stores = " (--dry-run adds the scores that attention stores on a processor)"
    flops_per_token = flops_of(first.workload._replace(recompute="none")) / per_iteration
    whose_times = "transformer-xl" if model.family == "transformer-xl" else "GPT-2"
    lines = [
        (
            f"{run.config.name}: {run.parameters:,} parameters, {run.tokens:,} tokens in batches of"
            f" {batch}, on {gpus} of"
            f" {cluster.title}{f', {cluster.software}' if cluster.software else ''}"
        ),
        (
            f"simulated; 90 % intervals{tried} come of measurements ({interval.source}); the cost"
            f" model was fitted on {fitted or 'none'} of these layouts"
        ),
        (
            f"memory is that of the fullest rank, this engine's{stores}, in {cluster.precision};"
            " TFLOP/s and MFU count the whole of attention, and no layer that is computed again;"
            f" times are a {whose_times}'s"
        ),
        *([f"extrapolated: {beyond}"] if beyond else []),
        "the order is by throughput times the chance that memory suffices",
        (
            f"{'tp':>3}{'pp':>4}{'dp':>5}{'micro':>7}{'chunks':>8}{'zero':>6} "
            f" {'recompute':<10}{'s/iteration':>12}"
            f"  {'90 %':>20}{'TFLOP/s/GPU':>13}{'MFU':>6}{'GiB':>7}{'fits':>6}"
            f"{'bytes':>16}{'days':>9}{'GPU-hours':>12}"
            f"{'cost' if price else '':>12}"
        ),
    ]
    for w, p in choices[:SHOWN]:
        run_seconds = p.seconds * run.tokens / per_iteration
        rate = per_iteration / p.seconds / gpus * flops_per_token
        lines.append(
            f"{w.tp:>3}{w.pp:>4}{w.dp:>5}{w.micro_batch:>7}{w.chunks:>8}{w.zero:>6} "
            f" {w.recompute:<10}"
            f"{p.seconds:>12.4g}"
            f"  {f'{p.low_seconds:.4g} to {p.high_seconds:.4g}':>20}"
            f"{rate / 1e12:>13.3g}{rate / peak:>6.1%}"
            f"{p.memory_bytes / 2**30:>7.1f}{p.probability_fits:>6.0%}{p.memory_bytes:>16,}"
            f"{run_seconds / 86400:>9.3g}{run_seconds / 3600 * gpus:>12,.0f}"
            + (f"{run_seconds / 3600 * gpus * price:>12,.0f}" if price else "")
        )
    if len(choices) > SHOWN:
        lines.append(f"and {len(choices) - SHOWN} further layouts that fit")
    if days:
        trained = days * 86400 / iteration_seconds * per_iteration
        lines.append(f"in {days:g} days without a failure the first trains {trained:,.0f} tokens")
    lines.append(goodput(run, cluster, first, iteration_seconds * run.tokens / per_iteration))
    return "\n".join(lines)


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]
