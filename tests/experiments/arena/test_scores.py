"""Scores say what a planner's answers are worth, and no planner sees what it is asked."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments.arena.planners import calculon, constant_mfu, ours, rule_of_thumb
from experiments.arena.scores import TOLD, Answer, answered, regrets, scores, told
from experiments.arena.sets import ptd_p, ultrascale, vtrain
from experiments.arena.terms import DataSet, Guess
from experiments.simulator import fits
from experiments.simulator.cluster import load_cluster, machine_of
from experiments.simulator.measurements import Measured
from experiments.simulator.workload import Workload, flops_of
from lineage.benchmark import read_benchmark
from tests.commands import call

BASE = Workload(8, 64, 1, 1024, 16, 8, 1024, 1, 8, 1)
LAYOUTS = [BASE._replace(tp=tp, dp=8 // tp) for tp in (1, 2, 4, 8)]


def answers(seconds: Sequence[float], guessed: Sequence[float], fits_: Sequence[bool] = (True,) * 4) -> list[Answer]:
    return [
        Answer(Measured(w, measured, 10.0), Guess((-guess,), guess, 0.9 * guess, 1.1 * guess, fit, 11.0))
        for w, measured, guess, fit in zip(LAYOUTS, seconds, guessed, fits_, strict=True)
    ]


def test_a_planner_that_knows_is_perfect() -> None:
    found = scores(answers((4.0, 2.0, math.nan, 3.0), (4.0, 2.0, 9.0, 3.0), (True, True, False, True)))
    perfect = {"mean error": 0, "median error": 0, "bias": 0, "coverage": 100, "balanced accuracy": 100,
               "rank correlation": 1, "median regret": 0, "worst regret": 0, "memory error": 10}  # fmt: skip
    assert {name: found[name] for name in perfect} == pytest.approx(perfect)
    assert found["interval's width"] == pytest.approx(20)


def test_errors_are_of_what_was_measured() -> None:
    found = scores(answers((1.0, 2.0, 4.0, 5.0), (2.0, 1.0, 4.0, 5.0)))
    assert (found["mean error"], found["bias"], found["coverage"]) == pytest.approx((37.5, 12.5, 50))
    assert "balanced accuracy" not in found  # nothing failed


def test_regret_is_what_the_recommendation_loses() -> None:
    assert regrets(answers((4.0, 2.0, 1.0, 3.0), (4.0, 1.0, 2.0, 3.0))) == pytest.approx([100])
    assert regrets(answers((4.0, 2.0, 1.0, 3.0), (5.0, 5.0, 5.0, 5.0))) == pytest.approx([150])  # any of equals
    assert regrets(answers((4.0, 2.0, math.nan, 3.0), (4.0, 2.0, 1.0, 3.0))) == pytest.approx([0])  # the next that ran


def test_a_planner_that_is_told_which_runs_stall_says_the_nearer() -> None:
    said = answers((4.0, 20.0, math.nan, 3.0), (4.0, 2.0, 1.0, 30.0))
    said = [one._replace(guess=one.guess._replace(otherwise=Guess((0.0,), seconds)))
            for one, seconds in zip(said, (40.0, 20.0, 10.0, 3.0), strict=True)]  # fmt: skip
    assert [one.guess.seconds for one in told(said)] == [4.0, 20.0, 1.0, 3.0]
    assert regrets(said) == pytest.approx([100 * (20 / 3 - 1)])
    assert regrets(told(said)) == pytest.approx([0])


def test_no_planner_sees_the_part_that_it_is_asked() -> None:
    rows = [Measured(w._replace(layers=layers), 1.0) for w in LAYOUTS for layers in (8, 16, 24)]
    data = DataSet("planted", "h100", rows, lambda w: w.layers)
    seen = []

    def guesses(cluster: str, known: Sequence[Measured], asked: Sequence[Workload]) -> list[Guess]:
        assert not {one.workload.layers for one in known} & {w.layers for w in asked}
        assert len(known) + len(asked) == len(rows)
        seen.extend(asked)
        return [Guess((0.0,)) for _ in asked]

    assert len(answered(data, guesses)) == len(rows)
    assert sorted(seen) == sorted(one.workload for one in rows)


def test_the_sets_are_whole() -> None:
    sets = [module.load() for module in (ultrascale, vtrain, ptd_p)]
    assert [len(data.rows) for data in sets] == [1230, 785, 10]
    assert [sum(row.ran for row in data.rows) for data in sets] == [624, 785, 10]


def test_a_constant_utilisation_is_that_of_what_is_known() -> None:
    peak = load_cluster("dgx-a100-80g").constants.matmul_flops_per_second.value
    known = [Measured(w, flops_of(w) / (w.gpus * peak * 0.25)) for w in LAYOUTS]
    (guess,) = constant_mfu.guesses("dgx-a100-80g", known, [BASE._replace(layers=16)])
    assert guess.seconds == pytest.approx(flops_of(BASE._replace(layers=16)) / (8 * peak * 0.25))


def test_the_rule_of_thumb_divides_no_further_than_memory_asks() -> None:
    large = BASE._replace(hidden=8192, heads=64, layers=48, recompute="full")
    for model, tp in ((BASE, 1), (large, 8)):
        asked = [model._replace(tp=each, dp=8 // each) for each in (1, 2, 4, 8)]
        said = rule_of_thumb.guesses("dgx-a100-80g", [], asked)
        assert asked[max(range(4), key=lambda place: said[place].preference)].tp == tp


def test_calculon_s_formulas_stay_below_the_peak_and_near_the_papers() -> None:
    """Its authors' own comparison with Table 1 is within 10 %; ours of its formulas is near that."""
    data = ptd_p.load()
    said = answered(data, calculon.guesses)
    assert scores(said)["mean error"] < 15
    peak = machine_of(load_cluster(data.cluster)).matmul_flops_per_second
    assert all(one.guess.seconds > flops_of(one.row.workload) / (one.row.workload.gpus * peak) for one in said)


def without_fits() -> None:
    """The simulator as shipped, in this process."""
    ours.fitted_h100 = lambda known: (machine_of(load_cluster("h100")), {})  # type: ignore[assignment]
    fits.fit = lambda machine, *rest, **how: machine


def test_the_command(tmp_path: Path) -> None:
    """Without fits, which take minutes: every planner is scored on every set, and the file is a result of its kind."""
    path = tmp_path / "arena.json"
    done = call({}, "mlm-experiment", "arena", "--json", str(path), prepare=without_fits)
    result = read_benchmark(path)
    sets = [case for case in result.cases if not case.axis]
    assert [len({series.contender for series in case.series}) for case in sets] == [3, 5, 4]
    assert {case.at for case in result.cases if case.axis} == {1, 2, 4, 8, 16, 32, 64}
    assert "balanced accuracy" in done.out
    means = {series.contender: series.samples[0] for series in sets[1].series if series.measure == "mean error"}
    assert sorted(means, key=lambda name: means[name])[:2] == [TOLD, ours.NAME]
