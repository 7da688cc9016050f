"""A ladder stands on the page with its verdict, its forecast and its figure."""

from pathlib import Path

import pytest

from mlm_repro.experiments.files import (
    Comparison,
    Forecast,
    Foreseen,
    LadderPlan,
    LadderResult,
    LadderRun,
    Law,
    RateLaw,
    RungPlan,
)
from mlm_repro.lineage.atomic import write_json
from mlm_repro.lineage.digest import check_seal, seal
from mlm_repro.lineage.errors import IntegrityFailure
from mlm_repro.lineage.files import write_document
from mlm_repro.lineage.records import Record, write_records
from mlm_repro.lineage.run import RunDirectory
from mlm_repro.reports.experiment_runs import sort_runs
from mlm_repro.reports.figures import draw
from mlm_repro.reports.ladder import ladder_exhibit
from mlm_repro.reports.report import Inputs, assemble
from tests.commands import call
from tests.reports.reproduction import page_text, write_reproduction

RATES = RateLaw(rate=0.004, parameters=1e5, size_exponent=0.4, tokens=1e6, length_exponent=0.32)
LAW = Law(
    irreducible=2.0,
    by_size=0.5,
    parameters=1e5,
    size_exponent=0.3,
    by_data=0.4,
    tokens=1e6,
    data_exponent=0.5,
)
SIZES = (30_000, 54_000, 97_000, 175_000)
PLACES = (0, 250_000, 500_000, 1_000_000)


def write_ladder(runs: Path) -> Path:
    rungs = [
        RungPlan(layers=1, width=64, heads=4, parameters=n, inner_parameters=n // 2) for n in SIZES
    ]
    plan = LadderPlan(
        cores=2,
        rungs=rungs,
        iterations=500,
        batch_size=16,
        seq_length=128,
        epochs=0.5,
        seeds=[1, 2],
        rates=[0.001, 0.002],
        search_iterations=100,
    )

    def run_of(rung: int, seed: int) -> LadderRun:
        curve = [(place, LAW.loss(SIZES[rung], max(place, 1000)) + 0.01 * seed) for place in PLACES]
        return LadderRun(
            name=f"r{rung}-{seed}",
            rung=rung,
            seed=seed,
            learning_rate=0.002,
            curve=curve,
            bits_per_byte=1,
        )

    done = [run_of(rung, seed) for rung in range(3) for seed in (1, 2)] + [run_of(3, 7)]
    curve = [
        Foreseen(
            tokens=p,
            loss=LAW.loss(SIZES[3], p),
            low=LAW.loss(SIZES[3], p) - 0.1,
            high=LAW.loss(SIZES[3], p) + 0.1,
        )
        for p in PLACES[1:]
    ]
    forecast = Forecast(law=LAW, misfit=0.004, rung=rungs[3], curve=curve, made_of={})
    difference = Comparison(
        text="wikitext103", smaller=1, larger=3, difference=-0.05, low=-0.06, high=-0.04
    )
    result = LadderResult(
        runs=done,
        verdict="HIT",
        bits_per_byte={},
        comparisons=[difference],
        rates=RATES,
        sentence="HIT: the largest rung was foreseen",
    )
    run = RunDirectory.begin(runs, "ladder", "ladder", {"rungs": 4}, {"dataset": "0" * 64})
    write_document(run.path / "plan.json", plan)
    write_document(run.path / "forecast.json", forecast)
    write_document(run.path / "ladder.json", result)
    record = Record(
        experiment="2019/figure-6",
        series="ladder, 30k",
        quantity="ladder_validation_loss",
        value=3.0,
        kind="scaled",
        source=run.path.name,
        digest="1" * 64,
        seed=1,
    )
    write_records(run.path / "records.jsonl", [record])
    run.complete()
    return run.path


def test_the_page_of_a_folder_of_runs_has_its_newest_ladder(tmp_path: Path) -> None:
    ladder = write_ladder(tmp_path)
    write_reproduction(tmp_path)
    reproduction, runs = sort_runs([tmp_path])
    assert runs == [ladder]
    report = assemble(Inputs(reproduction, runs))
    assert "ladder" in [exhibit.name for exhibit in report.all_exhibits]
    assert (
        "A forecast sealed before the training held: the largest model was foreseen."
        in page_text(reproduction, runs=runs)
    )


def test_what_it_says_is_what_was_found(tmp_path: Path) -> None:
    exhibit = ladder_exhibit(write_ladder(tmp_path))
    assert (
        "On wikitext103 rung 4 takes 0.050 bits per byte fewer than rung 2 (90 %: 0.040 to 0.060)."
        in exhibit.caption
    )
    assert [row[0] for row in exhibit.data.rows] == [
        "30000",
        "30000",
        "54000",
        "54000",
        "97000",
        "97000",
        "175000",
    ]
    assert exhibit.command == "mlm-experiment ladder --rungs 4"
    curves, ends, misses = draw(exhibit.panels).axes
    shown = [text.get_text() for text in curves.get_figure().legends[0].get_texts()]
    assert shown[:5] == ["30k", "54k", "97k", "175k", "forecast, 90 %"]
    assert "the law" in shown
    assert {axes.get_xscale() for axes in (curves, ends, misses)} == {"log"}
    found, by_law = LAW.loss(SIZES[3], PLACES[-1]) + 0.07, LAW.loss(SIZES[3], 500 * 16 * 128)
    assert misses.lines[-1].get_ydata() == pytest.approx([100 * (found / by_law - 1)])


def test_a_ladder_alone_has_its_figure(tmp_path: Path) -> None:
    ladder = write_ladder(tmp_path)
    done = call({}, "mlm-report", "figure", "ladder", ladder, "--out", ladder / "report", ends=0)
    assert done.out.strip() == str(ladder / "report" / "ladder.svg")
    assert "forecast, 90 %" in (ladder / "report" / "ladder.svg").read_text(encoding="utf-8")
    check_seal(ladder)


def test_a_damaged_ladder_is_refused(tmp_path: Path) -> None:
    ladder = write_ladder(tmp_path)
    write_reproduction(tmp_path)
    write_json(ladder / "ladder.json", {"verdict": "HIT"})
    with pytest.raises(IntegrityFailure, match=r"ladder\.json was changed after"):
        assemble(Inputs(*sort_runs([tmp_path])))
    seal(ladder)
    with pytest.raises(IntegrityFailure, match=r"ladder\.json is not what it should be"):
        assemble(Inputs(*sort_runs([tmp_path])))
