"""Verdicts come from sealed records and from what is worked out, and a predicted number is never
taken for a measured one.
"""

import json
import re
from dataclasses import replace
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.experiments.catalogue import (
    FACTS,
    NEEDS,
    UNANSWERED,
    find_experiment,
    group_of,
    load_experiments,
)
from mlm_repro.experiments.files import FITTED, HELD_OUT, VERDICTS
from mlm_repro.experiments.published import position, published_rows
from mlm_repro.experiments.ranges import as_range
from mlm_repro.experiments.runner import measure
from mlm_repro.experiments.sealed import seal_numbers
from mlm_repro.experiments.simulator.measurements import fitted_workloads, workload_of
from mlm_repro.experiments.verdicts import (
    COST_MODEL,
    Verdict,
    format_verdicts,
    judge,
    load_results,
    skill_sentence,
    skills,
    totals,
    unanswered,
)
from mlm_repro.experiments.worked_out import WorkedOut, work_out, worked_out
from mlm_repro.lineage.digest import seal
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.files import read_document
from mlm_repro.lineage.records import RECORDS, Record, write_records
from mlm_repro.lineage.run import RunDirectory
from tests import mutation
from tests.commands import ROOT, call
from tests.experiments.machines import with_gpus
from tests.experiments.simulated import seal_simulated
from tests.mutation import LAST_DIGIT, SIGN, Mutations

KEPT = load_results([ROOT / "results" / "ablations"])
EXPERIMENT = "2021/figure-11"
# 121 TFLOP/s, ± 5 %.
CLAIM = {
    "experiment": EXPERIMENT,
    "series": "B=8",
    "quantity": "tflops_per_gpu",
    "x": 4.0,
}
NOTHING = WorkedOut((), ())


def planted(root: Path, **values: Any) -> Path:
    """A sealed run with one record."""
    run = RunDirectory.begin(
        root,
        "planted",
        "experiment",
        {"mode": "measure", "values": sorted(map(str, values.items()))},
        {},
    )
    write_records(
        run.path / RECORDS,
        [Record(**({**CLAIM, "kind": "measured", "source": run.path.name} | values))],
    )
    run.complete()
    return run.path


def verdicts(*folders: Path, name: str = EXPERIMENT, worked: bool = False) -> dict[str, Verdict]:
    """By claim, from the folders, and if `worked` from what is worked out."""
    work = worked_out if worked else lambda experiment: NOTHING
    return {
        one.claim.id: one for one in judge([find_experiment(name)], load_results(folders), work)
    }


def verdict(*folders: Path) -> Verdict:
    return verdicts(*folders)["2021/figure-11/b=8/4"]


@pytest.mark.parametrize(
    ("kind", "value", "outcome", "scale"),
    [
        ("measured", 126.9, "confirmed", "same"),
        ("measured", 127.2, "contradicted", "same"),
        ("counted", 121, "confirmed", "same"),
        ("computed", 121.4, "confirmed", "arithmetic"),
        ("computed", 126.9, "contradicted", "arithmetic"),
        ("scaled", 121, "not-tried", ""),
        ("simulated", 121, "predicted", "simulated"),
        ("simulated", 60, "missed", "simulated"),
        ("published", 121, "not-tried", ""),
    ],
)
def test_kind_and_distance_decide(
    kind: str, value: float, outcome: str, scale: str, tmp_path: Path
) -> None:
    planted(tmp_path, kind=kind, value=value)
    assert (verdict(tmp_path).outcome, verdict(tmp_path).scale) == (outcome, scale)
    assert sum(one.outcome != "not-tried" for one in verdicts(tmp_path).values()) == (
        outcome != "not-tried"
    )


def test_a_measurement_speaks_before_a_simulation(tmp_path: Path) -> None:
    assert {one.outcome for one in verdicts(worked=True).values()} == {"fitted"}
    planted(tmp_path, value=60)
    assert verdicts(tmp_path, worked=True)["2021/figure-11/b=8/4"].outcome == "contradicted"


def test_a_verdict_does_not_depend_on_what_was_simulated_before(tmp_path: Path) -> None:
    before = verdicts(worked=True)
    planted(tmp_path, kind="simulated", value=60, low=50, high=70, note=HELD_OUT)
    seal_simulated(find_experiment(EXPERIMENT), tmp_path)
    after = verdicts(tmp_path, worked=True)
    assert [(one.outcome, one.scale, one.reason) for one in after.values()] == [
        (one.outcome, one.scale, one.reason) for one in before.values()
    ]


def test_without_a_run_the_reason_names_the_command(tmp_path: Path) -> None:
    assert (
        verdict(tmp_path).reason
        == "no run was found; `mlm-experiment run 2021/figure-11` makes one"
    )


def test_an_edited_record_is_found(tmp_path: Path) -> None:
    path = planted(tmp_path, value=60, kind="simulated") / RECORDS
    path.write_text(path.read_text().replace("simulated", "measured"))
    with pytest.raises(IntegrityFailure, match=r"records\.jsonl was changed"):
        verdict(tmp_path)


def test_a_simulated_number_cannot_be_called_measured_even_under_a_new_seal(tmp_path: Path) -> None:
    run = seal_simulated(find_experiment(EXPERIMENT), tmp_path)
    lines = [json.loads(line) for line in (run.path / RECORDS).read_text().splitlines()]

    def rewrite(**values: Any) -> None:
        (run.path / RECORDS).write_text("".join(json.dumps(line | values) + "\n" for line in lines))
        seal(run.path)

    rewrite(kind="measured")
    with pytest.raises(BadInput, match="a measured number has no interval"):
        verdict(tmp_path)
    rewrite(kind="measured", low=None, high=None)
    with pytest.raises(
        IntegrityFailure, match="made in mode simulate, which gives no measured numbers"
    ):
        verdict(tmp_path)


def test_a_run_without_a_seal_or_manifest_says_nothing(tmp_path: Path) -> None:
    unsealed = planted(tmp_path / "a", value=121)
    (unsealed / "COMPLETE").unlink()
    results = load_results([tmp_path / "a"])
    assert (results.records, len(results.left_out)) == ((), 1)
    bare = planted(tmp_path / "b", value=121)
    (bare / "manifest.json").unlink()
    seal(bare)
    with pytest.raises((IntegrityFailure, BadInput), match=r"manifest\.json"):
        load_results([tmp_path / "b"])


def test_simulated_and_computed_numbers_are_all_there_is_here() -> None:
    for name in ("2021/table-1", "2021/table-2", "2021/figure-6", "2021/figure-8", "2022/table-5"):
        worked = work_out(find_experiment(name))
        assert worked.refused == ()
        for record in (each.record for each in worked.numbers):
            assert record.kind in ("simulated", "computed")
            assert record.kind == "computed" or record.low <= record.value <= record.high  # type: ignore[operator]
        found = verdicts(name=name, worked=True).values()
        for one in found:
            assert (one.scale == "simulated") == (
                one.record is not None and one.record.kind == "simulated"
            )
            assert one.scale in ("simulated", "arithmetic", ""), one
        assert any(one.outcome == "confirmed" for one in found)


def test_a_row_that_cannot_run_is_answered_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = "experiment,series,cluster,gpus,global_batch,micro_batch,hidden,heads,layers,seq,"
    header += "vocab,tp,dp,pp"
    rows = [
        "ptd-p/figure-11,B=8,dgx-a100-80g,4,8,1,20480,128,80,2048,51200,1,1,4",
        "ptd-p/figure-11,B=8,dgx-a100-80g,32,8,1,20480,128,12,2048,51200,8,1,8",
    ]
    (tmp_path / "large-runs.csv").write_text("\n".join((header, *rows)) + "\n")
    monkeypatch.setattr("mlm_repro.experiments.published.HERE", tmp_path)
    worked = work_out(find_experiment(EXPERIMENT))
    assert (len(worked.numbers), len(worked.refused)) == (0, 2)
    found = {
        one.claim.id: one
        for one in judge([find_experiment(EXPERIMENT)], load_results([]), work_out)
    }
    assert "GiB of memory" in found["2021/figure-11/b=8/4"].reason
    assert "is not gpus = 32" in found["2021/figure-11/b=8/8"].reason
    assert {one.outcome for one in found.values()} == {"not-tried"}


def test_a_number_that_a_fit_has_seen_gets_no_verdict() -> None:
    """Figure 18 has Figure 12's interleaved workloads over again; Table 1 is held out but for two
    rows of vTrain."""
    notes = {}
    for name in ("2021/figure-11", "2021/figure-18", "2021/table-1"):
        simulated = [
            one for one in verdicts(name=name, worked=True).values() if one.scale == "simulated"
        ]
        notes[name] = {(one.claim.series, one.reason.split("; ")[-1]) for one in simulated}
        for one in simulated:
            assert (one.outcome == "fitted") == one.reason.endswith(FITTED)
            assert one.outcome in ("fitted", "predicted", "missed")
    assert {note for _, note in notes["2021/figure-11"]} == {FITTED}
    assert {series for series, note in notes["2021/table-1"] if note == FITTED} == {"3.6B", "18.4B"}
    assert {note for _, note in notes["2021/figure-18"]} == {FITTED, HELD_OUT}


def test_no_prediction_is_of_a_workload_that_its_fit_has_seen() -> None:
    """By the rows of the fits themselves, not by their notes."""
    seen = {
        workload
        for software in ("megatron-2019", "megatron-2021")
        for workload in fitted_workloads(software)
    }
    tried = 0
    for experiment in load_experiments().values():
        for part in experiment.parts:
            for row in published_rows(experiment, part) if part.simulated else ():
                workload = workload_of(row)._replace(
                    scatter_gather=row.get("scatter_gather") != "false",
                    sequence_parallel=int(row.get("sequence_parallel") == "true"),
                )
                for one in judge([experiment], load_results([])):
                    at_row = (one.claim.series, one.claim.x) == (
                        row["series"],
                        position(part, row)["x"],
                    )
                    if (
                        one.outcome in ("predicted", "missed")
                        and at_row
                        and one.claim.quantity in part.simulated
                    ):
                        tried += 1
                        assert workload not in seen, one.claim.id
    assert tried > 60


def test_the_same_prediction_in_two_exhibits_is_one_fact() -> None:
    found = {one.claim.id: one for one in judge(load_experiments().values(), load_results([]))}
    of_table, of_figure = (
        found["2021/table-2/zero-3/174.6b/384/tflops"],
        found["2021/figure-10/zero-3-174.6b/384"],
    )
    assert of_table.scale == of_figure.scale == "simulated"
    assert of_table.fact == of_figure.fact
    tried = [one for one in found.values() if one.outcome in ("predicted", "missed")]
    assert len({one.fact for one in tried}) < len(tried)
    (cell,) = (row[3] for row in totals(found.values()).rows if row[0] == "simulated")
    inside, facts, _, rows = map(int, re.findall(r"\d+", cell))
    assert (facts, rows) == (len({one.fact for one in tried}), len(tried))
    assert inside == facts - len({one.fact for one in tried if one.outcome == "missed"})


def test_a_prediction_stands_beside_simpler_rules() -> None:
    skill = skills(judge(load_experiments().values(), load_results([])))
    assert [*skill] == [COST_MODEL, "constant throughput", "bubble alone"]
    ours, *rules = skill.values()
    for rule in rules:
        assert ours.error < rule.error
        assert ours.score < rule.score
        assert ours.tried == rule.tried
    assert ours.tried > 50
    assert f"{ours.inside} lie in its 90 % interval" in skill_sentence(skill)
    assert skills([]) == {}


@pytest.mark.parametrize(
    ("number", "low", "high", "score"),
    [(100, 90, 110, 20), (100, 100, 110, 10), (100, 105, 110, 5 + 20 * 5)],
)
def test_an_interval_score_is_width_and_twenty_times_the_distance_beyond(
    number: float, low: float, high: float, score: float, tmp_path: Path
) -> None:
    """Gneiting and Raftery 2007, Equation 43, with α = 0.1; here in percent of the number."""
    planted(tmp_path, kind="simulated", value=(low + high) / 2, low=low, high=high, note=HELD_OUT)
    one = verdict(tmp_path)
    claim = one.claim.model_copy(update={"value": Decimal(number)})
    one = replace(one, claim=claim, baselines={"rule": as_range(number)})
    ours, rule = skills([one]).values()
    assert ours.score == pytest.approx(score)
    assert ours.inside == (low <= number <= high)
    assert (rule.score, rule.error) == (0, 0)


def test_every_claim_has_an_experiment_or_a_reason() -> None:
    open_claims = unanswered(load_experiments().values())
    assert {one.outcome for one in open_claims} == {"not-tried", "of-others"}
    assert [one.claim.id for one in open_claims if one.reason == "no experiment runs it"] == []
    assert UNANSWERED.keys() == {"context", "missing"}
    assert all(row["reason"] for rows in UNANSWERED.values() for row in rows)
    patterns = [
        pattern for rows in UNANSWERED.values() for row in rows for pattern in row["claims"]
    ]
    for pattern in patterns:
        assert any(fnmatchcase(one.claim.id, pattern) for one in open_claims), (
            f"{pattern} speaks of no open claim"
        )


def test_a_number_of_a_smaller_model_does_not_stand_beside_the_published_one() -> None:
    rows = format_verdicts(
        [*verdicts(ROOT / "results", name="2019/figure-6").values()]
    ).splitlines()[1:-2]
    assert [row.split("  scaled  ")[0].split()[-1] for row in rows] == ["—"] * len(rows)


def test_the_same_numbers_are_not_written_twice(tmp_path: Path) -> None:
    experiment = find_experiment("zero/communication")
    line = {"series": "a", "quantity": "b", "value": 1.0, "kind": "counted"}
    first, _ = seal_numbers(experiment, "-measured", [line], tmp_path)
    digest = first.digest
    again, _ = seal_numbers(experiment, "-measured", [line], tmp_path)
    assert (again.path, again.digest) == (first.path, digest)


def test_the_kept_reproduction_is_scaled_at_the_same_share_of_training() -> None:
    found = verdicts(ROOT / "results", name="2019/figure-6")
    assert {(one.outcome, one.record and one.record.kind) for one in found.values()} == {
        ("not-tried", "scaled")
    }
    last = found["2019/figure-6/8.3b/300000"].record
    assert last is not None
    assert last.x == 1200


def test_the_commands(tmp_path: Path) -> None:
    machine = with_gpus(tmp_path / "bin", 0, 0)
    runs = tmp_path / "runs"
    runs.mkdir()
    unfinished = RunDirectory.begin(runs, "unfinished", "experiment", {"mode": "measure"}, {})
    write_records(unfinished.path / RECORDS, [])
    whole = call(machine, "mlm-experiment", "compare", "--all", "--results", runs)
    assert whole.code == 3, whole.out
    assert whole.err.startswith("error: 2021/text/recompute-loss and ")
    table, by_paper, said, against, _ = whole.out.split("\n\n")
    assert table.split("\n")[0].split() == [
        "scale",
        "confirmed",
        "contradicted",
        "predicted",
        "not",
        "tried",
    ]
    assert len(by_paper.splitlines()) > 10
    for words in (
        "have no verdict",
        "in its 90 % interval",
        "Their rows need ",
        "quoted by the documents",
        "left out: 1 directories that were never finished",
        "--rows",
    ):
        assert words in said
    assert all("; an erratum: " in line for line in against.splitlines()[1:])
    rows = call(machine, "mlm-experiment", "compare", "--all", "--rows", "--results", runs).out
    for outcome in ("confirmed", "contradicted", "predicted", "not tried"):
        shown = sum(
            int(number)
            for line in table.splitlines()[1:]
            for number in cells_of(table, line, outcome)
        )
        given = rows.split("\nclaim ")[1].splitlines()
        assert shown == sum(f"  {outcome}  " in line for line in given), outcome
    planted(runs, value=60)
    done = call(machine, "mlm-experiment", "compare", "--all", "--results", runs, ends=3)
    more, fewer = (int(re.findall(r"and (\d+) more", each.err)[0]) for each in (done, whole))
    assert more == fewer + 1
    assert any(line.startswith("2021/figure-11/b=8/4 ") for line in done.out.splitlines())
    assert done.err.endswith(
        " more: a number of this suite contradicts the published claim; the table above has both\n"
    )


def cells_of(table: str, line: str, head: str) -> list[str]:
    """The rows in a cell under a head: the number in brackets, of a fraction its first."""
    heads = table.splitlines()[0]
    cell = line[heads.index(head) :].split("   ")[0].strip()
    return re.findall(r"\((\d+)", cell)


def test_every_claim_that_was_not_tried_says_what_it_needs_and_confirmed_ones_a_fact() -> None:
    for verdict in (
        *judge(load_experiments().values(), KEPT),
        *unanswered(load_experiments().values()),
    ):
        assert verdict.outcome != "not-tried" or verdict.needs in NEEDS
        is_same = (verdict.outcome, verdict.scale) == ("confirmed", "same")
        assert not is_same or str(group_of(verdict.claim, FACTS)).endswith("."), verdict.claim.id


@pytest.mark.parametrize(("note", "outcome"), [(FITTED, "fitted"), (HELD_OUT, "missed")])
def test_a_prediction_whose_interval_leaves_the_number_out_has_missed(
    note: str, outcome: str, tmp_path: Path
) -> None:
    planted(tmp_path, kind="simulated", value=130, low=125, high=135, note=note)
    assert verdict(tmp_path).outcome == outcome


def test_a_value_that_was_derived_here_is_arithmetic_and_nothing_measured() -> None:
    found = judge(load_experiments().values(), KEPT)
    derived = [one for one in found if one.claim.confidence == "derived" and one.record]
    assert {one.scale for one in derived} == {"arithmetic", "simulated"}
    assert {one.outcome for one in derived if one.scale == "arithmetic"} == {"confirmed"}


def test_every_confirmed_verdict_could_have_failed() -> None:
    """At the last printed digit; an effect turns at a reversed sign, a verdict under a planted
    fault."""
    rows = mutation.mutate(KEPT).rows
    kept = read_document(ROOT / "results" / "ablations" / VERDICTS, Mutations).rows
    assert {row.claim: row.noticed for row in kept} == {row.claim: row.noticed for row in rows}
    turned = [
        row.noticed[LAST_DIGIT] for row in rows if (row.outcome, row.scale) == ("confirmed", "same")
    ]
    assert sum(turned) >= 0.97 * len(turned) > 70
    signs = [row.noticed[SIGN] for row in rows if SIGN in row.noticed]
    assert all(signs)
    assert len(signs) > 3
    words, parts = mutation.FAULTS["parameters"]
    with mutation.planted(parts):
        biases = {one["series"]: one["value"] for one in measure(find_experiment("2019/table-1"))}
    right = {one["series"]: one["value"] for one in measure(find_experiment("2019/table-1"))}
    assert words == "biases are missing"
    assert all(biases[series] < right[series] for series in right)


def test_ten_faults_of_the_cost_model_turn_a_verdict_or_are_said_to_turn_none() -> None:
    none, *faults = mutation.cost_faults(load_results([]))
    assert (none.fault, none.turned) == ("no fault", [])
    assert len(faults) == 10
    unnoticed = [each.fault for each in faults if not each.turned]
    # No row of ZeRO-3, all of which are missed, is near an end of its interval.
    assert len(unnoticed) <= 4
    printed = mutation.format_mutations(Mutations(claims={}, rows=[], costs=[none, *faults]))
    for each in faults:
        line = next(line for line in printed.splitlines() if each.fault in line)
        assert ("no verdict here would notice" in line) == (each.fault in unnoticed)
    assert next(each.turned for each in mutation.cost_faults(load_results([]))) == [], (
        "the faults are gone again"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["compare"], 2, "name one experiment"),
        (["compare", "2021/figure-99"], 2, "there is no experiment '2021/figure-99'"),
        (["compare", "--all", "--results", "nowhere"], 2, "nowhere is not a directory"),
    ],
)
def test_a_mistake_gets_a_sentence(
    arguments: list[str], code: int, said: str, tmp_path: Path
) -> None:
    done = call(with_gpus(tmp_path / "bin", 0, 0), "mlm-experiment", *arguments, ends=code)
    assert said in done.err
    assert done.err.count("\n") == 1
