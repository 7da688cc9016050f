"""Train a configuration in this engine and in another from the same weights on the same samples, and compare."""

from pathlib import Path

import numpy as np
import torch

from engine.compare.tensors import DRAWS, FORMULA, curve_tolerance, factor
from engine.config import RunConfig
from experiments.benchmark import AGAINST, Benchmark, Case, Ratio, Series, TextTable, write_benchmark
from lineage.environment import describe_environment
from lineage.progress import announce
from lineage.run import RunDirectory
from verify.engines import StepResult
from verify.parity import LayoutDiffers
from verify.runner import Computed, Outcome, Reference, failed, hold, measured, on_ranks, train
from verify.work import described, engine_class, shared_work

QUANTITIES = {"loss": "loss", "norm": "gradient norm", "rate": "learning rate"}
MOST = 1e9
"""Largest reported ratio of a difference to its tolerance; also reported for NaN."""


def run_against(config: RunConfig, theirs: str, layout: str, iterations: int) -> Benchmark:
    """Train in both engines and compare every quantity and the weights at the end.

    The result has a case for each; a ratio is a difference divided by its tolerance.

    Raises BadInput for a configuration that cannot be compared, LayoutDiffers if ranks fail or a loss is NaN.
    """
    kind, layers = engine_class(theirs), config.model.num_layers
    torch.set_num_threads(1)
    with shared_work(config, layout, iterations, first_rate=int(theirs != "megatron-core")) as (work, chosen):
        announce(f"{2 + DRAWS} trainings of {iterations} iterations, each on {chosen.world_size} processes")
        first, *draws = [on_ranks(train, kind, work, chosen, None, draw, True) for draw in range(1 + DRAWS)]
        reference = measured([first, *draws], config.train.precision)
        (ours,) = hold(train, engine_class("ours"), work, [chosen], reference, 0, True)
    if ours.failure:
        raise failed(engine_class("ours"), ours.failure)
    curves = [each[0].steps for each in (ours.ranks, first, *draws)]
    cases = [_case(quantity, name, curves, theirs, layers) for quantity, name in QUANTITIES.items()]
    shares = [_share(row.tensor.removeprefix("updated "), [row.largest], [row.tolerance]) for row in ours.rows]
    cases.append(Case(name="weights at the end", ratios=shares))
    loss = cases[0].series[2].samples
    return Benchmark(
        benchmark="against",
        title=f"{described(theirs)} beside this engine: {config.name}, {chosen.name}, {config.train.precision}",
        cases=cases,
        disagreements=[
            f"{case.name}: {ratio.name} is beyond the tolerance, {ratio.value:.3g} times as large"
            for case in cases for ratio in case.ratios if not ratio.is_reached
        ],
        notes=[
            f"Tolerance {FORMULA}, the factor before the bracket being {factor(layers):.1f}: S is how far {DRAWS} runs "
            f"of {theirs} come from its first when every weight is moved by up to a unit round-off before every "
            "iteration, u the unit round-off of the format that x is held in (engine/compare/tensors.py).",
            "A ratio is the largest share of the tolerance that a difference takes.",
            *[f"Changed in {theirs} to run on CPUs: {patch}." for patch in kind.patches],
        ],
        setting={"iterations": iterations, "largest difference of the losses": f"{max(loss):.2g}"},
        environment=describe_environment(),
    )  # fmt: skip


def _case(quantity: str, name: str, curves: list[list[StepResult]], theirs: str, layers: int) -> Case:
    """Curves of ours, theirs and theirs with perturbed weights."""
    mine, others, *moved = [[getattr(step, quantity) for step in steps] for steps in curves]
    if not np.isfinite([mine, others]).all():
        raise LayoutDiffers(f"the {name} is no longer a number in one of the two trainings")
    allowed = curve_tolerance(others, moved, layers)
    apart = [abs(a - b) for a, b in zip(mine, others, strict=True)]
    shown = {"ours": mine, theirs: others, "difference": apart, "tolerance": allowed}
    series = [Series(contender=each, measure=name, samples=values) for each, values in shown.items()]
    return Case(name=name, series=series, ratios=[_share("all iterations", apart, allowed)])


def _share(name: str, distances: list[float], allowed: list[float]) -> Ratio:
    """Largest ratio of a difference to its tolerance."""
    shares = [
        distance / most if most else MOST * bool(distance) for distance, most in zip(distances, allowed, strict=True)
    ]
    return Ratio(name=name, value=min(max(shares), MOST), goal=1.0, less_is_better=True)


def iteration_table(result: Benchmark) -> TextTable:
    """Table of the losses at about twenty iterations."""
    curves = {series.contender: series.samples for series in result.cases[0].series}
    count = len(curves["ours"])
    shown = sorted({*range(0, count, -(-count // 20)), count - 1})
    rows = [
        (str(at + 1), *(f"{curve[at]:.{'1e' if name in ('difference', 'tolerance') else '7f'}}"
                        for name, curve in curves.items()))
        for at in shown
    ]  # fmt: skip
    return TextTable(("iteration", *curves), rows, 0, "loss")


def keep(result: Benchmark, name: str, config: RunConfig, runs: Path) -> Path:
    """Write the result into a sealed run `name`; the same work gets the same directory."""
    what = {"title": result.title, "setting": result.setting, "notes": result.notes} | config.model_dump(mode="json")
    run = RunDirectory.begin(runs, name, "against", what, {}, frozenset({"data"}))
    if not run.is_complete:
        write_benchmark(run.path / AGAINST, result)
        run.complete()
    return run.path


def record(
    config: RunConfig, engine: str, layout: str, iterations: int, draws: int = DRAWS, dropout: float = 0.0
) -> list[list[Computed]]:
    """Train an engine `draws` + 1 times, recording every tensor. Biases and layer norms start away from 0 and 1.

    Every engine uses Megatron-Core's learning rates and its own dropout masks. Raises BadInput if the engine cannot run
    the configuration.
    """
    kind = engine_class(engine)
    torch.set_num_threads(1)
    with shared_work(config, layout, iterations, dropout, nudges=True) as (work, chosen):
        announce(f"{1 + draws} trainings of {iterations} iterations, each on {chosen.world_size} processes")
        return [on_ranks(train, kind, work, chosen, None, draw) for draw in range(draws + 1)]


def compare_tensors(
    reference: Reference, config: RunConfig, engine: str, layout: str, iterations: int, dropout: float = 0.0
) -> Outcome:
    """Train another engine, and hold every tensor that both have against the reference.

    Raises BadInput if the engine cannot run the configuration, LayoutDiffers if ranks fail.
    """
    kind = engine_class(engine)
    torch.set_num_threads(1)
    with shared_work(config, layout, iterations, dropout, nudges=True) as (work, chosen):
        (outcome,) = hold(train, kind, work, [chosen], reference)
    if outcome.failure:
        raise failed(kind, outcome.failure)
    return outcome
