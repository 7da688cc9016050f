"""The catalogue on the page: its layers are the records and the published numbers, its verdicts
lead to their runs."""

import csv
import io
import re
from pathlib import Path

import pytest

from mlm_repro.experiments.catalogue import every_claim, find_experiment, load_experiments
from mlm_repro.experiments.verdicts import Results, Verdict, judge, load_results
from mlm_repro.experiments.worked_out import worked_out
from mlm_repro.lineage.errors import BadInput, Fault, IntegrityFailure
from mlm_repro.lineage.numbers import exact
from mlm_repro.lineage.records import Record
from mlm_repro.reports import report as assembled
from mlm_repro.reports.catalogue import ExperimentNumbers, catalogue_exhibit, drawn_layers
from mlm_repro.reports.claims import UNCOUNTED, Claims, group_claims
from mlm_repro.reports.exhibit import Exhibit, Table
from mlm_repro.reports.figures import draw
from mlm_repro.reports.report import Report
from mlm_repro.reports.style import LOOKS
from tests.reports.conftest import Built
from tests.reports.reproduction import make_report, page_text, write_reproduction
from tests.reports.runs import spoil
from tests.reports.test_page import Outline


@pytest.fixture
def runs(built: Built) -> list[Path]:
    return built.runs


@pytest.fixture(scope="module")
def report(built: Built) -> Report:
    return make_report(built.directory, runs=built.runs)


def rows_of(exhibit: Exhibit, *kinds: str) -> list[dict[str, str]]:
    """The rows of an exhibit's CSV, of some kinds alone."""
    rows = list(csv.DictReader(io.StringIO(exhibit.data.csv)))
    return [row for row in rows if not kinds or row["kind"] in kinds]


def exhibits_of(report: Report) -> dict[str, Exhibit]:
    return {exhibit.name: exhibit for exhibit in report.all_exhibits}


def test_every_table_and_figure_of_the_catalogue_is_there(report: Report) -> None:
    found = exhibits_of(report)
    for experiment in load_experiments().values():
        name = experiment.name.replace("/", "-")
        if experiment.reproduction and name not in found:
            continue  # a reproduction tells it elsewhere on the page
        exhibit = found[name]
        assert exhibit.panels or exhibit.tables or experiment.reproduction
        assert exhibit.command
        assert not exhibit.panels or (len(exhibit.alt) > 40 and exhibit.caption)


def test_two_exhibits_of_one_name_fail_the_build(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = Exhibit("models", "planted", (), Table((), ()))
    monkeypatch.setattr(assembled, "errata_exhibit", lambda claims: second)
    with pytest.raises(Fault, match="two exhibits of the page have the name models"):
        make_report(built.directory)


def test_each_csv_has_the_numbers_that_are_worked_out_once(report: Report) -> None:
    """A run of the same numbers adds none."""
    found = exhibits_of(report)
    for experiment in load_experiments().values():
        records = [each.record for each in worked_out(experiment).numbers]
        if not records or experiment.reproduction:
            continue
        rows = rows_of(found[experiment.name.replace("/", "-")], "simulated", "computed")
        assert len(rows) == len(records)
        for row, record in zip(rows, records, strict=True):
            for name in ("value", "low", "high", "x"):
                assert (float(row[name]) if row[name] else None) == getattr(record, name)
            for name in ("series", "quantity", "kind", "source", "digest", "x_name"):
                assert row[name] == (getattr(record, name) or "")


def test_the_published_layer_is_the_claims_to_the_digit(report: Report) -> None:
    found = exhibits_of(report)
    for experiment in load_experiments().values():
        name = experiment.name.replace("/", "-")
        if name in found and not experiment.reproduction:
            shown = [(row["series"], row["value"]) for row in rows_of(found[name], "published")]
            assert shown == [(claim.series, str(claim.value)) for claim in experiment.claims]


def test_what_is_drawn_is_what_the_csv_holds(report: Report, runs: list[Path]) -> None:
    results = load_results(runs)
    experiment = load_experiments()["2021/figure-12"]
    numbers = ExperimentNumbers(
        experiment, [one for one in results.records if one.experiment == experiment.name], []
    )
    drawn = {
        (
            layer.series,
            layer.kind,
            exact(point.x),
            exact(point.value),
            exact(point.low),
            exact(point.high),
        )
        for layer in drawn_layers(numbers, "tflops_per_gpu")
        for point in layer.points
    }
    rows = rows_of(catalogue_exhibit(numbers))
    columns = ("series", "kind", "x", "value", "low", "high")
    assert drawn == {tuple(row[name] for name in columns) for row in rows}


def test_several_measurements_are_a_mean_with_its_spread(report: Report, runs: list[Path]) -> None:
    experiment = load_experiments()["2021/figure-12"]
    first = next(one for one in load_results(runs).records if one.experiment == experiment.name)
    measured = {
        "kind": "measured",
        "low": None,
        "high": None,
        "source": "a-run",
        "digest": "d" * 64,
    }
    records = [
        first.model_copy(update={**measured, "value": value}) for value in (80.0, 84.0, 91.0)
    ]
    (layer,) = [
        one
        for one in drawn_layers(ExperimentNumbers(experiment, records, []), "tflops_per_gpu")
        if one.kind == "measured"
    ]
    (point,) = layer.points
    assert (point.value, point.low, point.high, point.count) == (85.0, 80.0, 91.0, 3)
    caption = " ".join(catalogue_exhibit(ExperimentNumbers(experiment, records, [])).caption)
    assert "Measured: 3 at a place" in caption


def test_the_verdicts_are_those_of_the_catalogue_and_lead_to_their_runs(
    report: Report, runs: list[Path]
) -> None:
    experiments = [one for one in load_experiments().values() if not one.reproduction]
    expected = {one.claim.id: one for one in judge(experiments, load_results(runs))}
    found = {one.claim.id: one for one in report.claims}
    assert expected.keys() <= found.keys()
    names = {origin.name for origin in report.origins}
    for name, verdict in expected.items():
        assert found[name] == verdict
        assert {
            report.homes[record.source] for record in found[name].beside if record.source
        } <= names
    outcomes = [one.outcome for one in report.claims]
    assert outcomes == sorted(outcomes, key=list(LOOKS).index)


def test_every_claim_stands_once_under_its_paper(report: Report) -> None:
    ids = [one.claim.id for paper in report.papers for part in paper.parts for one in part.claims]
    assert sorted(ids) == sorted(claim.id for claim in every_claim())
    for paper in report.papers:
        assert {one.claim.paper for one in paper.claims} == {paper.name}
        context = [one for one in paper.claims if one.outcome == "of-others"]
        assert paper.claims.counted == sum(one.outcome != UNCOUNTED for one in paper.claims)
        if context:
            assert list(paper.parts[-1].claims) == context
            assert paper.parts[-1].title == "Numbers of others"


def test_a_claim_shows_every_record_at_its_place() -> None:
    experiment = find_experiment("2021/figure-12")
    claim = experiment.claims[0]
    records = [
        Record(
            experiment=experiment.name,
            series=claim.series,
            quantity=claim.quantity,
            x=x,
            kind=kind,
            source="run",
            value=float(claim.value) * 1.5,
            digest="d" * 64,
        )
        for kind, x in (
            ("simulated", claim.x),
            ("measured", claim.x),
            ("measured", claim.x),
            ("measured", 1e9),
        )
    ]
    found = Claims.of(judge([experiment], Results(tuple(records), (), {})))
    one = next(each for each in found if each.claim.id == claim.id)
    assert one.record is records[1]
    assert [record.kind for record in one.beside] == ["measured", "simulated"]
    assert one.outcome == "contradicted"
    assert Claims([one]).deviations == [pytest.approx(0.5)]
    group, *_ = group_claims(found)
    assert [each.claim.id for each in group.against] == [claim.id]


def test_every_link_leads_somewhere_on_the_page(runs: list[Path], tmp_path: Path) -> None:
    html = page_text(write_reproduction(tmp_path), runs=runs)
    assert Outline(html).balanced
    identities = re.findall(r' id="([^"]+)"', html)
    links = set(re.findall(r'href="#([^"]+)"', html))
    assert {claim.id for claim in every_claim()} <= set(identities)
    assert {link for link in links if link.startswith("run-")}
    assert links - {link for link in links if re.fullmatch(r"m[0-9a-f]{10}", link)} <= set(
        identities
    )
    assert len(identities) == len(set(identities))


@pytest.mark.parametrize(("how", "named"), [("unfinished", True), ("empty", False)])
def test_a_run_without_numbers_changes_nothing(
    how: str, named: bool, runs: list[Path], tmp_path: Path
) -> None:
    good, bad = (
        next(run for run in runs if f"figure-{number}-" in run.name) for number in (12, 13)
    )
    reproduction, spoiled = write_reproduction(tmp_path), spoil(bad, tmp_path, how)
    report = make_report(reproduction, runs=[good, spoiled])
    assert report.claims == make_report(reproduction, runs=[good]).claims
    assert [f"{spoiled} was never finished" in sentence for sentence in report.left_out] == [
        True
    ] * named
    assert spoiled.name not in [origin.name for origin in report.origins]
    html = page_text(reproduction, runs=[good, spoiled])
    assert ("was never finished" in html) == named
    assert "No run of transformer-xl/gemm was given" in html


@pytest.mark.parametrize("how", ["changed", "corrupted", "unproven"])
def test_a_bad_run_is_refused_in_one_sentence(how: str, runs: list[Path], tmp_path: Path) -> None:
    good, bad = (
        next(run for run in runs if f"figure-{number}-" in run.name) for number in (12, 13)
    )
    sentence = {
        "changed": "was changed after",
        "corrupted": "records.jsonl line 1",
        "unproven": "has no digest",
    }[how]
    with pytest.raises((BadInput, IntegrityFailure), match=sentence):
        make_report(write_reproduction(tmp_path), runs=[good, spoil(bad, tmp_path, how)])


def test_a_run_whose_manifest_is_damaged_is_refused(runs: list[Path], tmp_path: Path) -> None:
    bad = spoil(runs[0], tmp_path, "sealed again")
    (bad / "manifest.json").write_text("{")
    with pytest.raises(IntegrityFailure, match=r"manifest\.json cannot be read"):
        make_report(write_reproduction(tmp_path), runs=[bad, runs[1]])


def test_an_effect_is_drawn_with_its_curves_and_what_came_of_it() -> None:
    experiment = find_experiment("transformer-xl/large-batch")
    assert experiment.ablation is not None
    about = {"experiment": experiment.name, "kind": "scaled", "source": "run"}
    records = []
    for arm, loss in zip(experiment.ablation.arms, (6.0, 5.0), strict=True):
        records.append(Record(**about, series=arm.name, quantity="learning_rate", value=0.02))
        for seed in (1, 2):
            of = about | {"series": arm.name, "seed": seed}
            points = ((0, 7.0), (512, loss + seed / 10))
            records += [
                Record(**of, quantity="validation_loss", x=x, x_name="tokens", value=y)
                for x, y in points
            ]
            records += [Record(**of, quantity="final_validation_loss", value=loss + seed / 10)]
            records += [
                Record(**of, quantity="diverged", value=float(seed == 2 and arm.name == "Adam"))
            ]
    claim = next(one for one in experiment.claims if one.id == "transformer-xl/post/lamb")
    verdict = Verdict(
        experiment.name, claim, "contradicted", "reduced", None, "Adam less LAMB: -1 nats"
    )
    exhibit = catalogue_exhibit(ExperimentNumbers(experiment, records, [verdict]))
    caption = " ".join(exhibit.caption)
    assert (
        "LAMB, clamped 6.150 (6.100 to 6.200) at the rate 0.02; Adam 5.150 (5.100 to 5.200), 1 of 2"
        " diverged" in caption
    )
    assert "contradicted: Adam less LAMB: -1 nats." in caption
    assert "against tokens" in exhibit.alt
    (axes,) = draw(exhibit.panels, exhibit.column).axes
    assert axes.get_xlabel() == "tokens"
