"""A small ladder from data to verdict: it goes on after a kill, verifies, and shows what was
changed in it."""

import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from mlm_repro.engine.config import RunConfig, TrainConfig
from mlm_repro.engine.costs import parameter_count
from mlm_repro.engine.data.dataset import DatasetFacts
from mlm_repro.evaluation.checkpoints import EvaluatedCheckpoint
from mlm_repro.evaluation.protocol import SourceText, Task
from mlm_repro.evaluation.tasks.documents import RunningText
from mlm_repro.evaluation.tasks.perplexity import UNCHANGED, PerplexityTask, sliding_stream
from mlm_repro.experiments.files import (
    FORECAST,
    PLAN,
    Forecast,
    LadderPlan,
    RungPlan,
    read_runs,
    write_runs,
)
from mlm_repro.experiments.forecast import ladder, study
from mlm_repro.experiments.forecast.ladder import (
    MOST_EPOCHS,
    SHAPES,
    TOKENS_PER_PARAMETER,
    best_rate,
    derive,
    describe_plan,
    make_plan,
    rate_law,
    rung_config,
    rung_model,
)
from mlm_repro.experiments.forecast.trainings import SEARCH_SEED, Trained, keep, read_kept, seeds_of
from mlm_repro.lineage.digest import seal
from mlm_repro.lineage.errors import BadInput, Interrupted
from mlm_repro.lineage.files import read_document, write_document
from mlm_repro.lineage.run import RunDirectory
from mlm_repro.verify.recomputed import RunCheck
from tests.commands import ROOT
from tests.experiments.forecast.edits import built, other_data, write_forecast_later

ITERATIONS, TRIAL = 24, 8


class Climbed(NamedTuple):
    run: Path
    other: Path
    """The forecast's own sealed directory."""


def tiny_plan(vocabulary: int) -> LadderPlan:
    rungs = [
        RungPlan(
            layers=layers,
            width=width,
            heads=heads,
            parameters=12 * layers * width**2 + width * 512,
            inner_parameters=12 * layers * width**2,
        )
        for layers, width, heads in SHAPES[:4]
    ]
    return LadderPlan(
        cores=2,
        rungs=rungs,
        iterations=ITERATIONS,
        batch_size=4,
        seq_length=128,
        epochs=1.0,
        seeds=[1, 2],
        rates=[0.002, 0.008],
        search_iterations=TRIAL,
    )


@pytest.fixture(scope="module", autouse=True)
def validations_are_short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "VALIDATION_SAMPLES", 16)
        yield


@pytest.fixture(scope="module")
def climbed(tmp_path_factory: pytest.TempPathFactory) -> Climbed:
    folder = tmp_path_factory.mktemp("ladder")
    runs, dataset = folder / "runs", built(folder)
    facts = DatasetFacts.read(dataset)
    run = RunDirectory.begin(runs, "ladder", "ladder", {"rungs": 4}, facts.parents)
    write_document(run.path / PLAN, tiny_plan(facts.padded_vocab_size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "make_forecast", stop)
        with pytest.raises(Interrupted):
            study.make_ladder(run, dataset, runs)
    before = {
        path: path.stat().st_mtime_ns
        for path in runs.glob("ladder-*x*/COMPLETE")
        if not path.parent.is_symlink()
    }
    assert len(before) == 3 * (2 + 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "build_task", lambda name, evaluated: small_text(evaluated))
        study.make_ladder(run, dataset, runs)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    return Climbed(run.path, next(runs.glob("ladder-forecast-*")))


def stop(*_: object) -> None:
    raise Interrupted("stopped between the smaller rungs and the forecast")


def small_text(evaluated: EvaluatedCheckpoint) -> Task:
    words = np.random.default_rng(0).choice(["one", "two", "three"], (8, 40))
    text = RunningText.of_documents(
        SourceText("small", "small", "0" * 64), [" ".join(line) for line in words]
    )
    window = evaluated.model.seq_length
    stream = sliding_stream(text, UNCHANGED, evaluated.tokenizer, window, window // 2)
    return PerplexityTask(text, stream, evaluated.tokenizer)


def test_the_largest_rung_has_the_seed_of_its_sealed_forecast(climbed: Climbed) -> None:
    result, records = derive(climbed.run)
    largest = result.runs[-1]
    assert (largest.rung, largest.seed) == (3, *seeds_of(climbed.run / FORECAST, 1))
    assert (climbed.other / FORECAST).read_bytes() == (climbed.run / FORECAST).read_bytes()
    forecast = read_document(climbed.run / FORECAST, Forecast)
    assert len(forecast.made_of) == 6
    assert all("2x84" not in name for name in forecast.made_of)
    end = forecast.curve[-1]
    assert result.verdict == ("HIT" if end.low <= largest.loss <= end.high else "MISS")
    assert [each.seed for each in result.runs[:-1]] == 3 * [1, 2]
    foreseen = [record for record in records if record.kind == "simulated"]
    assert [(record.low, record.high) for record in foreseen] == [(end.low, end.high)]
    assert [len(values) for values in result.bits_per_byte.values()] == [4]
    assert [(each.text, each.smaller, each.larger) for each in result.comparisons] == [
        ("small", 0, 2),
        ("small", 1, 3),
    ]
    for each in result.comparisons:
        values = result.bits_per_byte["small"]
        assert each.low < each.difference < each.high
        assert each.difference == pytest.approx(values[each.larger] - values[each.smaller])


def trial(rate: float, loss: float, rung: int = 0) -> Trained:
    train = TrainConfig(seed=SEARCH_SEED, learning_rate=rate, min_learning_rate=rate)
    config = RunConfig(name="trial", model=rung_model(*SHAPES[rung]), train=train)
    return Trained(f"{rate:g}", config, "", "", {0: 7.0, 1: loss}, loss, math.isfinite(loss))


@pytest.mark.parametrize(
    ("losses", "rate"),
    [
        ([4.2, 4.0, 4.1, 4.4], 4 * 2 ** (1 / 6)),
        ([4.2, 4.0, 4.2, 9.0], 4),
        ([4.0, 4.1, 4.2, 4.3], 2),
        ([4.2, 4.1, 4.0], 8),
    ],
)
def test_the_best_rate_is_the_lowest_point_between_the_trials(
    losses: list[float], rate: float
) -> None:
    trials = [
        trial(each, loss) for each, loss in zip((0.002, 0.004, 0.008, 0.016), losses, strict=False)
    ]
    assert best_rate(trials) == pytest.approx(rate / 1000, rel=2e-3)


def test_the_rates_of_all_sizes_follow_one_law() -> None:
    """Best rates that fall with the square root of the size give it, for any size and for longer
    trainings."""
    plan = tiny_plan(1024)
    planted = {
        rung: 0.004 * (plan.rungs[0].parameters / plan.rungs[rung].parameters) ** 0.5
        for rung in range(3)
    }
    factors, diverged = (0.5, 1.0, 2.0), trial(0.1, math.nan, 2)
    trials = {
        rung: [diverged, *(trial(best * each, 4 + abs(math.log(each)), rung) for each in factors)]
        for rung, best in planted.items()
    }
    law = rate_law(plan, trials)
    tried = TRIAL * plan.batch_size * plan.seq_length
    for rung, sizes in enumerate(plan.rungs):
        expected = 0.004 * (plan.rungs[0].parameters / plan.rungs[rung].parameters) ** 0.5
        assert law.at(sizes.parameters, tried) == pytest.approx(expected, rel=6e-3)
        assert law.at(sizes.parameters, 5 * tried) == pytest.approx(expected * 0.2**0.32, rel=6e-3)


def test_a_plan_trains_ten_tokens_for_each_parameter_of_the_largest(tmp_path: Path) -> None:
    kept = read_document(ROOT / "results" / "ladder" / PLAN, LadderPlan)
    plan = make_plan(6, 2, 1024, 6_742_439)
    assert plan.rungs == kept.rungs
    assert (
        TOKENS_PER_PARAMETER <= plan.tokens / plan.rungs[-1].parameters < 1.1 * TOKENS_PER_PARAMETER
    )
    assert re.search(r"expected: about [\d:]+ on 2 cores", describe_plan(plan))
    for number, rung in enumerate(plan.rungs):
        config = rung_config(plan, number, 1, 0.004, tmp_path)
        model = config.model.model_copy(update={"vocab_size": 1024, "padded_vocab_size": 1024})
        assert parameter_count(model) == rung.parameters
        trial = rung_config(plan, number, SEARCH_SEED, 0.004, tmp_path)
        assert trial.train.warmup_iterations == config.train.warmup_iterations
        assert trial.name != config.name
    with pytest.raises(
        BadInput, match=f"4 rungs would read them 270.3 times, more than {MOST_EPOCHS:g}"
    ):
        make_plan(4, 2, 1024, 10_000)


def test_rates_that_all_diverge_are_refused() -> None:
    with pytest.raises(BadInput, match="at every learning rate"):
        rate_law(tiny_plan(1024), {rung: [trial(0.1, math.nan, rung)] for rung in range(3)})


def test_an_honest_ladder_verifies_and_keeps_what_was_trained(
    climbed: Climbed, tmp_path: Path
) -> None:
    check = RunCheck(climbed.run)
    assert not check.broken
    assert not check.absent
    kept = {each.name: each.losses for each in read_kept(climbed.run)}
    for name in kept:
        keep(climbed.run.parent / name, tmp_path)
    assert {each.name: each.losses for each in read_kept(tmp_path)} == kept


def edit_forecast(run: Path) -> None:
    forecast = read_document(run / FORECAST, Forecast)
    end = forecast.curve[-1].model_copy(update={"low": 0.1, "high": 9.0})
    write_document(
        run / FORECAST, forecast.model_copy(update={"curve": [*forecast.curve[:-1], end]})
    )


def edit_metrics(run: Path, name: str, edit: Callable[[list[dict[str, Any]]], object]) -> None:
    """Edit the validations that a ladder keeps of the first training whose name begins so."""
    runs = read_runs(run)
    edit(next(each for each in runs.values() if each.name.startswith(name)).metrics)
    write_runs(run, runs.values())


def reuse_a_seed(run: Path) -> None:
    first = next(
        each
        for each in read_runs(run).values()
        if re.match("ladder-2x36-rate-.*-seed-1-", each.name)
    )
    (second,) = (name for name in read_runs(run) if re.match("ladder-2x36-rate-.*-seed-2-", name))

    def edit(lines: list[dict[str, Any]]) -> None:
        lines[:] = first.metrics

    edit_metrics(run, second, edit)


def cut_short(run: Path) -> None:
    edit_metrics(run, "ladder-2x84-rate-", lambda lines: [lines.pop(), lines.pop()])


def another_end(run: Path) -> None:
    edit_metrics(run, "ladder-2x84-rate-", lambda lines: lines[-1].update(loss=1.5))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (write_forecast_later, "was changed or made after its trainings"),
        (edit_forecast, "forecast.json is not what the trainings of the smaller rungs give"),
        (other_data, "was trained on other data than forecast.json says"),
        (reuse_a_seed, "have the same losses"),
        (another_end, "ladder.json: "),
        (cut_short, "metrics.jsonl does not end where the training did"),
    ],
)
def test_what_was_changed_is_named(
    climbed: Climbed, tmp_path: Path, edit: Callable[[Path], None], words: str
) -> None:
    shutil.copytree(climbed.run.parent, tmp_path / "runs", symlinks=True)
    run = tmp_path / "runs" / climbed.run.name
    edit(run)
    seal(run)
    assert words in " ".join(RunCheck(run).broken)
