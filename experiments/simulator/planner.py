"""Layouts of a model on a cluster, ranked by the simulator. Imports no torch."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from mlm_repro.data_pipeline.files import DATASET, DataCard
from mlm_repro.engine.pipeline.schedule import ideal_bubble
from mlm_repro.engine.run.resolved import ResolvedRun, read_run
from mlm_repro.experiments.simulator.cluster import Cluster, machine_of
from mlm_repro.experiments.simulator.measurements import ITERATIONS_PER_EPOCH, fitted_workloads
from mlm_repro.experiments.simulator.simulate import Prediction, iteration_parts, simulate
from mlm_repro.experiments.simulator.workload import NOT_COSTED, NotCosted, Workload, flops_of
from mlm_repro.lineage.errors import HardwareMissing
from mlm_repro.lineage.files import read_document
from mlm_repro.lineage.progress import announce

EPOCH_TOKENS = ITERATIONS_PER_EPOCH * 512 * 1024
"""The 2019 paper's epoch at its batch and context."""
MOST_CHUNKS = 8
LARGEST_MICRO_BATCH = 64
MOST_UNEVEN = 1.1
"""Layers of the fullest stage over those of the mean."""
SHOWN = 10
OWN = "this-engine"
"""Software that is planned for, unless another is named."""
RECOMPUTE = ("none", "selective", "full")


class Choice(NamedTuple):
    """A layout that runs, and what it takes."""

    workload: Workload
    prediction: Prediction


def read_model(model: str) -> ResolvedRun:
    """A shipped model or a TOML file. Raises NotCosted for a `config.json`, which describes another's model."""
    if model.endswith(".json"):
        raise NotCosted(f"{model}: {NOT_COSTED}")
    return read_run(model)


def dataset_tokens(run: ResolvedRun) -> int:
    """Training tokens of the dataset that the run names; 0 if it names none."""
    cards = [read_document(each / DATASET, DataCard) for each in run.dataset.directories] if run.dataset else []
    return sum(card.splits["train"].tokens for card in cards if "train" in card.splits)


def ranked_layouts(run: ResolvedRun, cluster: Cluster, gpus: int) -> list[Choice]:
    """Every layout that divides and fits, by its rate times the chance that it fits; the batch is the model's.

    Raises HardwareMissing with a reason where none does.
    """
    template = Workload.of_run(run.config, 1)
    workloads = list(possible_layouts(template, cluster, gpus))
    announce(f"predicts {len(workloads):,} layouts")
    predictions = simulate(cluster, workloads, run.config)
    choices = [Choice(*pair) for pair in zip(workloads, predictions, strict=True) if not pair[1].reason]
    if not choices:
        why = f"; of one, {predictions[-1].reason}" if predictions else _nearest(template, cluster, gpus)
        raise HardwareMissing(f"no layout of {run.config.name} on {gpus} GPUs can run{why}")
    return sorted(choices, key=expected_seconds)


def expected_seconds(choice: Choice) -> float:
    """Seconds of an iteration over the chance that the layout fits."""
    return choice.prediction.seconds / choice.prediction.probability_fits


def possible_layouts(template: Workload, cluster: Cluster, gpus: int) -> Iterator[Workload]:
    """Layouts in which tensor parallelism stays in a node (2021 paper, Takeaway 1) and everything divides evenly, but
    for layers over stages of one chunk, which may differ a little.
    """
    t, is_own = template, cluster.software == OWN
    modes = ("none", "full") if cluster.constants.fused_attention.value else RECOMPUTE
    for tp in _divisors(gpus, int(cluster.constants.gpus_per_node.value)):
        if t.heads % tp or t.inner % tp:
            continue
        for pp in _divisors(gpus // tp, t.layers):
            dp = gpus // (tp * pp)
            if t.global_batch % dp or -(-t.layers // pp) * pp > MOST_UNEVEN * t.layers:
                continue
            for micro_batch in _divisors(t.global_batch // dp, LARGEST_MICRO_BATCH):
                for chunks in range(1, MOST_CHUNKS + 1 if pp > 1 else 2):
                    if chunks > 1 and (t.layers % (pp * chunks) or t.global_batch // (dp * micro_batch) % pp):
                        continue
                    for mode, zero in product(modes, range(1 + (dp > 1 and is_own))):
                        yield t._replace(
                            gpus=gpus, micro_batch=micro_batch, tp=tp, dp=dp, pp=pp, chunks=chunks, recompute=mode,
                            zero=zero, sequence_parallel=int(is_own and tp > 1 and t.seq % tp == 0),
                        )  # fmt: skip


def _nearest(template: Workload, cluster: Cluster, gpus: int) -> str:
    """Says which numbers of GPUs would divide."""
    below, above = (
        next((n for n in numbers if any(True for _ in possible_layouts(template, cluster, n))), None)
        for numbers in (range(gpus - 1, 0, -1), range(gpus + 1, 4 * gpus))
    )
    return f": none divides the batch and model; on {' or '.join(str(n) for n in (below, above) if n)} one does"


def reasons(choices: Sequence[Choice]) -> str:
    """A line that says how much longer the best layout takes that differs from the first in one respect."""
    first, said = choices[0], []
    for name in ("tp", "pp", "recompute", "zero", "micro_batch"):
        own = getattr(first.workload, name)
        if other := next((choice for choice in choices if getattr(choice.workload, name) != own), None):
            times = expected_seconds(other) / expected_seconds(first)
            said.append(f"{name} {own}: {getattr(other.workload, name)} takes {times:.2f} ×")
        else:
            said.append(f"{name} {own}: no other fits")
    return f"why the first: {'; '.join(said)}"


def explain(cluster: Cluster, choice: Choice) -> str:
    """Shares of the iteration's time and its limit; every number is simulated.

    Communication is what the iteration would save if that were free; the bubble is its closed form.
    """
    machine, w = machine_of(cluster), choice.workload
    parts = iteration_parts(machine, [w])
    silent = machine.replaced(collective_slowdown=0.0, host_collective_seconds=0.0, tensor_step_seconds=0.0)
    near = machine.replaced(link_bytes_per_second=1e30, network_bytes_per_second=1e30)
    pipeline, tensor, messages = (
        float(each.pipeline[0]) for each in (parts, iteration_parts(silent, [w]), iteration_parts(near, [w]))
    )
    bubble = ideal_bubble("interleaved" if w.chunks > 1 else "1f1b", w.pp, w.chunks, w.microbatches)
    total, gradients, optimizer, host = (
        float(part[0]) for part in (parts.total, parts.gradients, parts.optimizer, parts.host)
    )
    shares = {"tensor-parallel communication": pipeline - tensor, "pipeline messages": pipeline - messages,
              "pipeline bubble": pipeline * bubble / (1 + bubble), "data-parallel communication": gradients,
              "optimizer": optimizer, "host, between iterations": host}  # fmt: skip
    shares = {"computation": total - sum(shares.values())} | shares
    lines = [f"where the {total:.4g} s of the first layout go"]
    lines += [f"  {name:<32}{seconds:>10.4g} s {seconds / total:>7.1%}  {'█' * round(40 * seconds / total)}"
              for name, seconds in shares.items() if seconds > 0]  # fmt: skip
    most = max(shares, key=lambda name: shares[name])
    chance = choice.prediction.probability_fits
    return "\n".join([*lines, f"limited by {most}; fits with a chance of {chance:.0%}"])


def format_plan(run: ResolvedRun, cluster: Cluster, choices: Sequence[Choice]) -> str:
    """The best layouts as a table, with what the whole run takes; every number in it is simulated."""
    model, gpus, own = run.config.model, choices[0].workload.gpus, dataset_tokens(run)
    batch = run.config.train.global_batch_size
    per_iteration, epoch = batch * model.seq_length, own or EPOCH_TOKENS
    peak = cluster.constants.matmul_flops_per_second.value
    beyond = choices[0].prediction.extrapolated
    interval, known = cluster.interval(gpus, beyond), fitted_workloads(cluster.software)
    fitted = sum(choice.workload in known for choice in choices)
    tried = f", which held {interval.coverage:.0%} of them," if interval.coverage is not None else ""
    whole = flops_of(choices[0].workload._replace(recompute="none")) / per_iteration
    whose_times = "transformer-xl" if model.family == "transformer-xl" else "GPT-2"
    fused = cluster.constants.fused_attention.value
    stores = " (--dry-run adds the scores that attention stores on a processor)" if fused else ""
    lines = [
        f"{run.config.name}: {run.parameters:,} parameters, {run.tokens:,} tokens in batches of "
        f"{batch}, on {gpus} of {cluster.title}{f', {cluster.software}' if cluster.software else ''}",
        f"simulated; 90 % intervals{tried} come of measurements ({interval.source}); the cost model was fitted on "
        f"{fitted or 'none'} of these layouts; an epoch is {epoch:,} tokens "
        f"({'the dataset' if own else '2019 paper'})",
        f"memory is that of the fullest rank, this engine's{stores}, in {cluster.precision}; TFLOP/s and MFU count the "
        f"whole of attention, and no layer that is computed again; times are a {whose_times}'s",
        *([f"extrapolated: {beyond}"] if beyond else []),
        "the order is by throughput times the chance that memory suffices",
        f"{'tp':>3}{'pp':>4}{'dp':>5}{'micro':>7}{'chunks':>8}{'zero':>6}  {'recompute':<10}{'s/iteration':>12}"
        f"  {'90 %':>20}{'TFLOP/s/GPU':>13}{'MFU':>6}{'GiB':>7}{'fits':>6}{'bytes':>16}{'days/epoch':>12}{'days':>9}"
        f"{'GPU-hours':>12}",
    ]
    for w, p in choices[:SHOWN]:
        run_seconds = p.seconds * run.tokens / per_iteration
        rate = per_iteration / p.seconds / gpus * whole
        lines.append(
            f"{w.tp:>3}{w.pp:>4}{w.dp:>5}{w.micro_batch:>7}{w.chunks:>8}{w.zero:>6}  {w.recompute:<10}"
            f"{p.seconds:>12.4g}"
            f"  {f'{p.low_seconds:.4g} to {p.high_seconds:.4g}':>20}{rate / 1e12:>13.3g}{rate / peak:>6.1%}"
            f"{p.memory_bytes / 2**30:>7.1f}{p.probability_fits:>6.0%}{p.memory_bytes:>16,}"
            f"{p.seconds * epoch / per_iteration / 86400:>12.3g}{run_seconds / 86400:>9.3g}"
            f"{run_seconds / 3600 * gpus:>12,.0f}"
        )
    if len(choices) > SHOWN:
        lines.append(f"and {len(choices) - SHOWN} further layouts that fit")
    return "\n".join(lines)


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]
