"""How well planners foresee what others measured: time, memory, what fits, which layout is fast. Imports no torch."""

import math
import pkgutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import numpy as np
from scipy.stats import spearmanr  # type: ignore[import-untyped]

from experiments.arena import planners, sets
from experiments.arena.planners import ours
from experiments.arena.terms import DataSet, Guess, Guesses
from experiments.bench.timing import NOTES
from experiments.simulator.measurements import Measured
from experiments.simulator.workload import Floats
from lineage.benchmark import Benchmark, Case, Ratio, Series
from lineage.progress import announce

GOALS = {"mean error": 12.0, "memory error": 8.0, "balanced accuracy": 90.0, "median regret": 2.0, "p90 regret": 10.0}
"""What the simulator aims at on the H100s, in percent."""
CHOICE = "choice's time over the best's on H100, 90th percentile"
TOLD = f"{ours.NAME}, told which runs stall"
SHARES = (CHOICE, "rank correlation")
"""Measures that are not in percent."""


class Answer(NamedTuple):
    """A measured configuration and what a planner said of it."""

    row: Measured
    guess: Guess


def arena() -> Benchmark:
    """Every planner's scores on every data set."""
    every = [module.load() for module in _modules(sets)]
    competing = [*_modules(planners)]
    announce(f"{len(competing)} planners on {sum(len(data.rows) for data in every):,} measured configurations")
    cases, curves = [], []
    for data in every:
        answers = {planner.NAME: answered(data, planner.guesses) for planner in competing}
        found = {name: scores(each) for name, each in answers.items()}
        if any(one.guess.otherwise for one in answers[ours.NAME]):
            found[TOLD] = scores(told(answers[ours.NAME]))
        cases.append(_case(data.name, found))
        if any(not row.ran for row in data.rows):
            cases[-1] = cases[-1].model_copy(update={"ratios": _ratios(found[ours.NAME])})
            curves = _by_nodes(answers)
    return Benchmark(
        benchmark="arena", title="Planners of layouts, scored on what others measured", cases=[*cases, *curves],
        notes=NOTES["arena"], setting={data.name: f"{len(data.rows):,} configurations" for data in every},
    )  # fmt: skip


def answered(data: DataSet, guesses: Guesses) -> list[Answer]:
    """All rows with what the planner says of each after seeing the other parts."""
    parts = [data.part(row.workload) for row in data.rows]
    answers = []
    for part in dict.fromkeys(parts):
        asked = [row for row, its in zip(data.rows, parts, strict=True) if its == part]
        known = [row for row, its in zip(data.rows, parts, strict=True) if its != part]
        said = guesses(data.cluster, known, [row.workload for row in asked])
        answers += [Answer(*pair) for pair in zip(asked, said, strict=True)]
    return answers


def scores(answers: Sequence[Answer]) -> dict[str, float]:
    """Each measure that the answers allow, in percent but for the rank correlation."""
    ran = [one for one in answers if one.row.ran]
    seconds, low, high, guessed, memory, needed = np.array(
        [(one.row.seconds, one.guess.low, one.guess.high, one.guess.seconds, one.row.memory_gib, one.guess.memory_gib)
         for one in ran]
    ).T  # fmt: skip
    errors, off = 100 * (guessed / seconds - 1), 100 * np.abs(needed / memory - 1)
    lost = regrets(answers)
    found = {"mean error": np.abs(errors).mean(), "median error": np.median(np.abs(errors)), "bias": errors.mean(),
             "coverage": _share_of((low <= seconds) & (seconds <= high), low),
             "interval's width": np.median(100 * (high - low) / guessed), "memory error": off.mean(),
             "balanced accuracy": _balanced_accuracy(answers), "rank correlation": _rank_correlation(ran)}  # fmt: skip
    if len(lost):
        found |= {"median regret": np.median(lost), "p90 regret": np.quantile(lost, 0.9), "worst regret": lost.max()}
    return {name: float(value) for name, value in found.items() if np.isfinite(value)}


def told(answers: Sequence[Answer]) -> list[Answer]:
    """The answers of a planner that knows of each run whether it stalled: what no layout tells. The nearer of what it
    says of both is taken, and the fastest of these is preferred.
    """
    found = []
    for row, guess in answers:
        both = [each for each in (guess, guess.otherwise) if each]
        nearest = min(both, key=lambda each: abs(math.log(each.seconds / row.seconds))) if row.ran else guess
        found.append(Answer(row, nearest._replace(preference=(-nearest.seconds,))))
    return found


def regrets(answers: Sequence[Answer]) -> Floats:
    """Of each model and number of GPUs with several that ran, how much longer the recommended takes, in percent."""
    found = []
    for group in _groups(answers):
        ran = [one for one in group if one.row.ran]
        if len(ran) > 1:
            first = max(one.guess.preference for one in ran)
            times = np.array([one.row.seconds for one in ran])
            chosen = times[[one.guess.preference == first for one in ran]]
            found.append(100 * (chosen.mean() / times.min() - 1))
    return np.array(found)


def _groups(answers: Sequence[Answer]) -> Iterator[list[Answer]]:
    """Layouts of one model and batch on so many GPUs."""
    groups = defaultdict(list)
    for one in answers:
        w = one.row.workload
        groups[w.gpus, w.global_batch, w.hidden, w.layers, w.seq].append(one)
    yield from groups.values()


def _balanced_accuracy(answers: Sequence[Answer]) -> float:
    ran = np.array([one.row.ran for one in answers])
    fits = np.array([one.guess.fits or False for one in answers])
    return float("nan") if ran.all() else float(100 * (fits[ran].mean() + (~fits[~ran]).mean()) / 2)


def _rank_correlation(ran: Sequence[Answer]) -> float:
    found = [
        spearmanr([one.row.seconds for one in group], [one.guess.seconds for one in group]).statistic
        for group in _groups(ran)
        if len(group) > 2 and len({one.guess.seconds for one in group}) > 1
    ]
    return float(np.mean(found)) if found else float("nan")


def _share_of(inside: np.ndarray, low: Floats) -> float:
    return float("nan") if np.isnan(low).any() else float(100 * inside.mean())


def _case(name: str, of: dict[str, dict[str, float]], **place: object) -> Case:
    series = [
        Series(contender=planner, measure=measure, unit="" if measure in SHARES else "%", samples=[value])
        for planner, found in of.items() for measure, value in found.items()
    ]  # fmt: skip
    return Case.model_validate({"name": name, "series": series} | place)


def _ratios(found: dict[str, float]) -> list[Ratio]:
    more = "balanced accuracy"
    return [Ratio(name=f"{name} of {ours.NAME}, %", value=found[name], goal=goal, less_is_better=name != more)
            for name, goal in GOALS.items()]  # fmt: skip


def _by_nodes(answers: dict[str, list[Answer]]) -> list[Case]:
    """Points of curves by the number of nodes."""
    cases = []
    for gpus in sorted({one.row.workload.gpus for one in answers[ours.NAME]}):
        of: dict[str, dict[str, float]] = {}
        for name, each in answers.items():
            found = scores([one for one in each if one.row.workload.gpus == gpus])
            of[name] = {"median error on H100": found["median error"]} if "median error" in found else {}
            of[name][CHOICE] = 1 + found["p90 regret"] / 100
        cases.append(_case(f"{gpus // 8} nodes", of, axis="nodes of 8", at=gpus / 8))
    return cases


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    for module in pkgutil.iter_modules(package.__path__):
        yield import_module(f"{package.__name__}.{module.name}")
