"""An ablation's forecast gives the seeds of its trainings, and its verdicts are those of the paired
intervals."""

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlm_repro.data_pipeline.tokens.token_file import TokenFile
from mlm_repro.engine.data.dataset import DatasetFacts
from mlm_repro.experiments.catalogue import (
    Arm,
    Effect,
    Experiment,
    find_experiment,
    load_experiments,
)
from mlm_repro.experiments.files import (
    FORECAST,
    RUNS,
    EffectForecast,
    RateSweep,
    read_runs,
    write_runs,
)
from mlm_repro.experiments.forecast.ablation import (
    Finding,
    ablation_config,
    doubts_of,
    find_effect,
    loss_after,
)
from mlm_repro.experiments.forecast.study import bigram_loss, run_ablation
from mlm_repro.experiments.forecast.trainings import Kept, Trained, seeds_of
from mlm_repro.experiments.verdicts import judge, load_results
from mlm_repro.lineage.atomic import write_json
from mlm_repro.lineage.digest import seal
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.files import read_document, read_object
from mlm_repro.lineage.records import RECORDS, read_records, write_records
from mlm_repro.lineage.run import MANIFEST
from mlm_repro.verify.recomputed import RunCheck
from tests.commands import ROOT, call
from tests.engine.conftest import write_dataset
from tests.experiments.forecast.edits import built, other_data, reseal, write_forecast_later

ABLATIONS = {name: one for name, one in load_experiments().items() if one.ablation}


def shrunk(name: str, iterations: int, **changed: Any) -> Experiment:
    """A shipped experiment that trains so few iterations of four samples, `changed` in its
    ablation."""
    experiment = find_experiment(name)
    assert experiment.ablation is not None
    small = {
        "iterations": iterations,
        "global_batch_size": 4,
        "microbatch_size": 4,
        "validation_interval": 4,
        "validation_samples": 32,
    }
    train = experiment.ablation.train | small | changed.pop("train", {})
    ablation = experiment.ablation.model_copy(update={"train": train} | changed)
    return experiment.model_copy(update={"ablation": ablation})


RIGHT = Effect(claim="transformer-xl/paper/memory", of="no memory", less="memory of 16", above=0.0)
SWAPPED = Effect(
    claim="transformer-xl/readme/hours", of="memory of 16", less="no memory", above=0.0
)


def memory() -> Experiment:
    """A tiny ablation whose second arm is trained at a rate that teaches it nothing; of its effects
    one is swapped."""
    arms = (Arm(name="memory of 16"), Arm(name="no memory", rates=(1e-5,)))
    return shrunk(
        "transformer-xl/memory",
        8,
        rates=(1e-2, 1e6),
        search_share=0.5,
        arms=arms,
        effects=(RIGHT, SWAPPED),
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ablation")
    return run_ablation(memory(), [built(folder)], folder / "runs").path


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """The run with nothing beside it."""
    return shutil.copytree(trained, tmp_path / trained.name)


@pytest.mark.parametrize("name", ABLATIONS)
def test_arms_differ_in_what_they_change_alone(name: str) -> None:
    ablation = ABLATIONS[name].ablation
    assert ablation is not None
    begun = ablation.arms[0]
    plain = ablation_config(name, ablation, begun, 1, 1e-3).model_dump(mode="json")
    for arm in ablation.arms:
        first, second = (ablation_config(name, ablation, arm, seed, 1e-3) for seed in (1, 2))
        assert first.train.model_copy(update={"seed": 2}) == second.train
        described = first.model_dump(mode="json")
        changes = ("model", arm.model | begun.model), ("train", arm.train | begun.train)
        for section, changed in changes:
            differing = {
                key for key, value in described[section].items() if plain[section].get(key) != value
            }
            assert differing <= changed.keys()
        if first.train.precision == "fp16":
            assert first.train.initial_loss_scale == 2**16


@pytest.mark.parametrize("name", ABLATIONS)
def test_what_is_forecast_is_what_the_claim_says(name: str) -> None:
    """Every number that a forecast allows agrees with its claim, and as many rates are tried for
    every arm."""
    ablation, claims = (
        ABLATIONS[name].ablation,
        {claim.id: claim for claim in ABLATIONS[name].claims},
    )
    assert ablation is not None
    assert not claims or {effect.claim for effect in ablation.effects} <= claims.keys()
    for effect in ablation.effects if claims else ():
        inside = [
            end + side
            for end, side in ((effect.above, 1e-9), (effect.below, -1e-9))
            if end is not None
        ]
        assert all(claims[effect.claim].agrees(number) for number in inside)
    assert len({len(arm.rates or ablation.rates) for arm in ablation.arms}) == 1


def test_the_seeds_are_those_of_the_sealed_forecast(trained: Path) -> None:
    seeds = seeds_of(trained / FORECAST, 5)
    kept = [each for each in Kept(trained).trained.values() if not each.is_trial]
    assert sorted(each.config.train.seed for each in kept) == sorted(2 * seeds)
    (sealed,) = (
        path for path in trained.parent.glob("ablation-forecast-*") if not path.is_symlink()
    )
    assert (sealed / FORECAST).read_bytes() == (trained / FORECAST).read_bytes()
    forecast = read_object(trained / FORECAST)
    assert forecast["rates"] == {"memory of 16": 1e-2, "no memory": 1e-5}
    assert len(forecast["searched"]) == 3
    assert list(forecast["searched"].values()).count("") <= 1


def test_a_run_is_judged_by_its_intervals_and_verifies(trained: Path) -> None:
    results = load_results([trained])
    found = {
        one.claim.id: one for one in judge([find_experiment("transformer-xl/memory")], results)
    }
    assert {name: one.outcome for name, one in found.items()} == {
        RIGHT.claim: "undecided",
        SWAPPED.claim: "undecided",
        "transformer-xl/readme/perplexity": "not-tried",
    }
    right, swapped = (found[effect.claim].record for effect in (RIGHT, SWAPPED))
    assert [right, swapped] == list(results.records[-2:])
    assert right is not None
    assert swapped is not None
    assert (right.value, right.low) == (-swapped.value, -(swapped.high or 0))
    assert 0 < (right.low or 0) < right.value
    curve = [
        one
        for one in results.records
        if (one.series, one.quantity) == ("no memory", "validation_loss")
    ]
    assert [one.x for one in curve] == 5 * [0.0, 256.0, 512.0]
    reason = found[RIGHT.claim].reason
    assert reason.startswith("no memory less memory of 16: +")
    assert (
        "the rate of no memory, 1e-05, is at the edge of those tried; the rate of memory of 16,"
        " 0.01, is at" in reason
    )
    check = RunCheck(trained)
    assert not check.broken
    assert not check.absent


def ended(loss: float, is_finished: bool = True) -> Trained:
    """A training whose last loss, after 512 tokens, is this."""
    config = ablation_config("x", memory().ablation, Arm(name="one"), 1, 1e-3)  # type: ignore[arg-type]
    return Trained("", config, "", "", {0: 9.0, 512: loss}, loss, is_finished)


def grid(
    losses: list[list[float]],
    rate: float,
    bigrams: float,
    is_finished: bool = True,
    of_rate: float = 1.0,
    **claimed: float,
) -> tuple[Finding, list[str]]:
    """What an effect of two arms is found to be, tried at .001, .01 and .1, and the reasons for
    doubts."""
    ablation = memory().ablation
    assert ablation is not None
    rates = (0.001, 0.01, 0.1)
    ablation = ablation.model_copy(
        update={"arms": (Arm(name="one", of_rate=of_rate), Arm(name="other")), "rates": rates}
    )
    forecast = EffectForecast(
        experiment="x",
        ablation={},
        datasets=["d"],
        bits_per_nat=[1.0],
        bigram_nats=[bigrams],
        rates={"one": rate, "other": 0.01},
        searched={},
    )
    one, other = losses
    arms = {
        "one": [ended(loss, is_finished) for loss in one],
        "other": [ended(loss) for loss in other],
    }
    effect = Effect(claim="x", of="one", less="other", **(claimed or {"above": 0.0}))
    doubts = doubts_of(effect, ablation, forecast, arms)
    about = {"experiment": "x", "source": "x", "kind": "scaled"}
    return find_effect(effect, 0.95, arms, {"one": 1.0, "other": 1.0}, about, doubts), doubts


HIGH, LOW = [5.1, 5.2, 5.15, 5.12, 5.18], [5.0] * 5


def test_an_effect_is_seen_where_every_arm_learned_inside_its_grid() -> None:
    finding, doubt = grid([HIGH, LOW], 0.01, bigrams=6.0)
    assert (finding.outcome, doubt, finding.is_number) == ("confirmed", [], True)


@pytest.mark.parametrize(
    ("claimed", "outcome"), [({"above": 0.0}, "confirmed"), ({"below": 0.0}, "undecided")]
)
def test_only_the_arm_that_is_claimed_to_be_better_must_have_learned(
    claimed: dict[str, float], outcome: str
) -> None:
    finding, doubt = grid([HIGH, LOW], 0.01, bigrams=5.1, **claimed)
    assert finding.outcome == outcome
    assert doubt == ["one learned no more than a count of bigrams (5.150, 5.100 nats)"] * (
        outcome == "undecided"
    )
    finding, doubt = grid([HIGH, LOW], 0.01, bigrams=5.1, above=-0.2, below=0.2)
    assert len(doubt) == 1


@pytest.mark.parametrize(
    ("rate", "bigrams", "is_finished", "reason"),
    [
        (0.001, 6.0, True, "the rate of one, 0.001, is at the edge of those tried"),
        (0.01, 5.0, True, "other learned no more than a count of bigrams (5.000, 5.000 nats)"),
        (0.01, 6.0, False, "one diverged in 5 of 5 trainings"),
    ],
)
def test_an_edge_a_divergence_and_a_bigrams_level_leave_an_effect_undecided(
    rate: float, bigrams: float, is_finished: bool, reason: str
) -> None:
    finding, doubt = grid([HIGH, LOW], rate, bigrams, is_finished)
    assert (finding.outcome, doubt) == ("undecided", [reason])
    assert finding.sentence.endswith(reason)
    assert finding.is_number == is_finished
    assert ("nats (" in finding.sentence.removesuffix(reason)) == is_finished, (
        "what diverged has no nats"
    )


def test_an_edge_is_seen_in_a_rate_that_was_multiplied_and_rounded() -> None:
    """The edge 0.1 of the grid times 1/3 is 0.03333 to four digits."""
    _, doubt = grid([HIGH, LOW], 0.03333, bigrams=6.0, of_rate=1 / 3)
    assert doubt == ["the rate of one, 0.03333, is at the edge of those tried"]


def test_bigrams_are_counted_in_the_training_text(tmp_path: Path) -> None:
    """p(b | a) = (c(a, b) + k(a) · p(b)) / (c(a) + k(a)), one token after the other."""
    dataset = built(tmp_path)
    train, valid = (
        TokenFile(dataset / f"{split}_text_document").tokens.tolist()
        for split in ("train", "valid")
    )
    size = DatasetFacts.read(dataset).padded_vocab_size
    pairs, single, after = Counter(pairwise(train)), Counter(train), Counter(train[:-1])
    kinds = Counter(first for first, _ in pairs)
    nats = []
    for first, second in pairwise(valid):
        k, share = max(kinds[first], 1), (single[second] + 1) / (len(train) + size)
        nats.append(-math.log((pairs[first, second] + k * share) / (after[first] + k)))
    assert bigram_loss(dataset) == pytest.approx(sum(nats) / len(nats))


def test_what_is_undecided_is_no_reason_for_exit_code_3(trained: Path) -> None:
    one = call(
        {}, "mlm-experiment", "compare", "transformer-xl/memory", "--results", trained, ends=0
    )
    assert "undecided  reduced  memory of 16 less no memory: -" in one.out


def test_what_is_finished_is_found_again(trained: Path) -> None:
    runs = trained.parent
    before = {path: path.stat().st_mtime_ns for path in runs.glob("*/COMPLETE")}
    assert run_ablation(memory(), [runs.parent / "built" / "small"], runs).path == trained
    assert {path: path.stat().st_mtime_ns for path in runs.glob("*/COMPLETE")} == before


KEPT = sorted(path.parent for path in (ROOT / "results" / "ablations").glob(f"*-effects-*/{RUNS}"))


@pytest.mark.parametrize("run", KEPT, ids=lambda run: run.name)
def test_a_kept_ablation_verifies(run: Path) -> None:
    assert not RunCheck(run).broken


def test_the_newest_kept_ablation_is_that_of_its_experiment() -> None:
    newest = {}
    for run in sorted(KEPT, key=lambda run: str(read_object(run / MANIFEST)["created"])):
        forecast = read_object(run / FORECAST)
        newest[forecast["experiment"]] = forecast["ablation"]
    assert newest
    for name, forecast in newest.items():
        ablation = find_experiment(name).ablation
        assert ablation is not None
        assert forecast == ablation.model_dump(mode="json"), name


def shorten(run: Path) -> None:
    training = next(each for name, each in read_runs(run).items() if "-no-memory-seed-" in name)
    assert training.manifest
    training.manifest["config"]["train"]["learning_rate"] = 0.5
    reseal(run, training)


def edit_a_manifest_alone(run: Path) -> None:
    training = next(iter(read_runs(run).values()))
    assert training.manifest
    training.manifest["config"]["train"]["weight_decay"] = 0.5
    write_runs(run, (read_runs(run) | {training.name: training}).values())


def edit_a_seal_alone(run: Path) -> None:
    training = next(iter(read_runs(run).values()))
    assert training.seal
    training.seal["files"]["summary.json"]["bytes"] += 1
    write_runs(run, (read_runs(run) | {training.name: training}).values())


def another_rate(run: Path) -> None:
    forecast = read_object(run / FORECAST)
    forecast["rates"]["memory of 16"] = 0.5
    write_json(run / FORECAST, forecast)


def double_records(run: Path) -> None:
    records = read_records(run / RECORDS)
    write_records(
        run / RECORDS, [record.model_copy(update={"value": 2 * record.value}) for record in records]
    )


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (write_forecast_later, "the forecast was changed or made after its trainings"),
        (edit_a_manifest_alone, "its manifest.json is not the one that was sealed"),
        (edit_a_seal_alone, "is damaged or was edited"),
        (shorten, "was trained with other settings than forecast.json gives it"),
        (other_data, "was trained on another dataset than forecast.json states"),
        (another_rate, "has other learning rates than the search that is kept beside it gives"),
        (double_records, "does not have in records.jsonl the numbers that its kept trainings give"),
    ],
)
def test_what_was_changed_after_the_run_is_refused(
    copied: Path, edit: Callable[[Path], None], words: str
) -> None:
    edit(copied)
    seal(copied)
    with pytest.raises(IntegrityFailure, match=words):
        load_results([copied])
    assert words in " ".join(RunCheck(copied).broken)


def planted(differences: list[float], **claimed: float) -> Finding:
    """What is found where the arms of each seed differ by so much."""
    arms = {
        "one": [ended(5 + each) for each in differences],
        "other": [ended(5.0) for _ in differences],
    }
    effect = Effect.model_validate({"claim": "x", "of": "one", "less": "other", **claimed})
    about = {"experiment": "x", "source": "x", "kind": "scaled"}
    return find_effect(effect, 0.95, arms, {"one": 1.0, "other": 1.0}, about)


@pytest.mark.parametrize(
    ("differences", "claimed", "outcome"),
    [
        ([0.1, 0.2, 0.15, 0.12, 0.18], {"above": 0.0}, "confirmed"),
        ([0.1, 0.2, 0.15, 0.12, 0.18], {"above": 0.12}, "undecided"),
        ([0.1, 0.2, 0.15, 0.12, 0.18], {"below": 0.0}, "contradicted"),
        ([0.1, -0.2, 0.15, -0.12, 0.1], {"above": 0.0}, "undecided"),
        ([0.01, -0.01, 0.0, 0.01, -0.01], {"above": -0.02, "below": 0.02}, "confirmed"),
        ([0.1, 0.2, 0.15, 0.12, 0.18], {"above": -0.02, "below": 0.02}, "contradicted"),
    ],
)
def test_the_verdict_is_where_students_interval_lies(
    differences: list[float], claimed: dict[str, float], outcome: str
) -> None:
    finding = planted(differences, **claimed)
    assert finding.outcome == outcome
    assert ("would have shown" in finding.sentence) == (outcome == "undecided")
    # Student's t of 4.
    mean, reach = (
        np.mean(differences),
        2.7764 * np.std(differences, ddof=1) / math.sqrt(5),
    )
    assert (finding.record.low, finding.record.high) == pytest.approx(
        (mean - reach, mean + reach), rel=1e-3
    )


def test_a_training_that_diverged_counts_as_the_untrained_model() -> None:
    lost = ended(7.0, is_finished=False)._replace(losses={0: 7.0})
    above = ended(9.0)._replace(losses={0: 7.0, 256: 5.0, 512: 9.0})
    assert loss_after(lost, 1) == loss_after(above, 1) == 7.0
    learned = above._replace(losses={0: 7.0, 256: 5.0, 512: 4.0}, final=4.1)
    assert (loss_after(learned, 1), loss_after(learned, 0.5), loss_after(learned, 0.25)) == (
        4.1,
        5.0,
        6.0,
    )


def test_datasets_of_other_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="2019/figure-6 has no ablation to train; the experiments"):
        run_ablation(find_experiment("2019/figure-6"), [tmp_path], tmp_path)
    experiment = shrunk("transformer-xl/tokens", 4)
    first, second = (write_dataset(tmp_path / name) for name in ("one", "other"))
    with pytest.raises(BadInput, match="takes --dataset 2 times; it was given 1"):
        run_ablation(experiment, [first], tmp_path / "runs")
    card = json.loads((second / "dataset.json").read_text(encoding="utf-8"))
    card["splits"] = {"valid": {"prefix": "x", "documents": 1, "bytes": 1, "tokens": 1}}
    (second / "dataset.json").write_text(json.dumps(card), encoding="utf-8")
    with pytest.raises(BadInput, match="do not hold the same text"):
        run_ablation(experiment, [first, second], tmp_path / "runs")


def test_the_finder_gives_the_rates(tmp_path: Path) -> None:
    dataset = built(tmp_path)
    shipped = find_experiment("transformer-xl/learning-rate-finder").ablation
    assert shipped is not None
    short: dict[str, Any] = {
        "arms": shipped.arms[:2],
        "effects": shipped.effects[:1],
        "finder": (1e-3, 1.0),
    }
    found = shrunk("transformer-xl/learning-rate-finder", 12, search_share=1.0, seeds=5, **short)
    run = run_ablation(found, [dataset], tmp_path / "runs")
    rates = read_object(run.path / FORECAST)["rates"]
    highest = rates["LAMB at the finder's rate"]
    assert 1e-3 < highest <= 1
    assert rates["LAMB at a fifth of it"] == pytest.approx(highest / 5, rel=1e-3)
    assert len(load_results([run.path]).findings) == 1


def test_an_arm_takes_another_arms_rate_scaled(tmp_path: Path) -> None:
    shipped = find_experiment("transformer-xl/rate-scaling").ablation
    assert shipped is not None
    assert [(arm.rate_of, round(arm.of_rate**2)) for arm in shipped.arms[1:]] == [
        (shipped.arms[0].name, n) for n in (1, 8, 64)
    ]
    small, large = shipped.arms[0], shipped.arms[2:]
    arms = (
        small.model_copy(
            update={"train": {"global_batch_size": 2, "microbatch_size": 2, "iterations": 8}}
        ),
        *large,
    )
    found = shrunk("transformer-xl/rate-scaling", 4, arms=arms, rates=(1e-5, 0.02), seeds=5)
    run = run_ablation(found, [built(tmp_path)], tmp_path / "runs")
    forecast = read_object(run.path / FORECAST)
    base = forecast["rates"][small.name]
    assert base in (1e-5, 0.02)
    assert list(forecast["rates"].values()) == pytest.approx(
        [base, math.sqrt(8) * base, 8 * base], rel=1e-3
    )
    assert len(forecast["searched"]) == 2
    assert not RunCheck(run.path).broken


@pytest.mark.parametrize(("bad", "lowest"), [(1e9, 1e-2), (4.0, 1e-2), (0.5, 1.0)])
def test_a_sweep_gives_the_rate_of_its_lowest_loss_until_it_diverges(
    bad: float, lowest: float
) -> None:
    rates = [10 ** (-4 + 4 * place / 400) for place in range(401)]
    losses = [2 + (math.log10(rate) + 2) ** 2 / 4 for rate in rates]
    found = RateSweep(
        rates=rates, losses=[*losses[:-60], *[bad] * 30, *[0.0 if bad > 4 else bad] * 30]
    ).lowest_rate
    assert found == pytest.approx(lowest, rel=0.3)  # the average lags a little


def test_a_sweep_whose_loss_never_falls_gives_no_rate() -> None:
    assert RateSweep(rates=[1e-4, 1e-3, 1e-2], losses=[3.0, 3.1, 3.2]).lowest_rate is None
    assert RateSweep(rates=[], losses=[]).lowest_rate is None


def test_the_kept_sweeps_give_the_rates_that_they_stated() -> None:
    paths = [*(ROOT / "results" / "ablations").glob("*/sweeps/*.json")]
    assert len(paths) == 4
    for path in paths:
        assert read_document(path, RateSweep).lowest_rate == read_object(path)["lowest_rate"]
