"""Verdicts come from sealed records alone, and a simulated number is never taken for a measured one."""

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.experiments import mutation
from mlm_repro.experiments.catalogue import FACTS, NEEDS, find_experiment, group_of, load_experiments, unanswered_claims
from mlm_repro.experiments.files import FITTED, HELD_OUT, LAST_DIGIT, SIGN
from mlm_repro.experiments.runner import measure, run_experiment
from mlm_repro.experiments.verdicts import COLUMNS, Verdict, format_verdicts, judge, load_results, named, unanswered
from mlm_repro.lineage.digest import seal
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.records import RECORDS, Record, read_records, write_records
from mlm_repro.lineage.run import RunDirectory
from tests.commands import ROOT, call
from tests.experiments.machines import with_gpus

KEPT = load_results([ROOT / "results" / "ablations"])
EXPERIMENT = "2021/figure-11"
CLAIM = {"experiment": EXPERIMENT, "series": "B=8", "quantity": "tflops_per_gpu", "x": 4.0}  # 121 TFLOP/s, ± 5 %


def planted(root: Path, **values: Any) -> Path:
    """A sealed run with one record."""
    run = RunDirectory.begin(
        root, "planted", "experiment", {"mode": "measure", "values": sorted(map(str, values.items()))}, {}
    )
    write_records(run.path / RECORDS, [Record(**({**CLAIM, "kind": "measured", "source": run.path.name} | values))])
    run.complete()
    return run.path


def verdicts(*folders: Path, name: str = EXPERIMENT) -> dict[str, Verdict]:
    return {one.claim.id: one for one in judge([find_experiment(name)], load_results(folders))}


def verdict(*folders: Path) -> Verdict:
    return verdicts(*folders)["2021/figure-11/b=8/4"]


@pytest.mark.parametrize(
    ("kind", "value", "outcome"),
    [
        ("measured", 126.9, "reproduced"),
        ("measured", 127.2, "not-reproduced"),
        ("counted", 121, "reproduced"),
        ("computed", 121, "consistent"),
        ("computed", 60, "inconsistent"),
        ("scaled", 121, "not-run"),
        ("simulated", 121, "simulated"),
        ("simulated", 60, "simulated"),
        ("published", 121, "not-run"),
    ],
)
def test_kind_and_distance_decide(kind: str, value: float, outcome: str, tmp_path: Path) -> None:
    planted(tmp_path, kind=kind, value=value)
    assert verdict(tmp_path).outcome == outcome
    assert sum(one.outcome != "not-run" for one in verdicts(tmp_path).values()) == (outcome != "not-run")


def test_a_measurement_speaks_before_a_simulation(tmp_path: Path) -> None:
    run_experiment(find_experiment(EXPERIMENT), tmp_path)
    assert {one.outcome for one in verdicts(tmp_path).values()} <= {"simulated", "missed"}
    planted(tmp_path, value=60)
    assert verdict(tmp_path).outcome == "not-reproduced"


def test_without_a_run_the_reason_names_the_command(tmp_path: Path) -> None:
    assert verdict(tmp_path).reason == "no run was found; `mlm-experiment run 2021/figure-11` makes one"


def test_an_edited_record_is_found(tmp_path: Path) -> None:
    path = planted(tmp_path, value=60, kind="simulated") / RECORDS
    path.write_text(path.read_text().replace("simulated", "measured"))
    with pytest.raises(IntegrityFailure, match=r"records\.jsonl was changed"):
        verdict(tmp_path)


def test_a_simulated_number_cannot_be_called_measured_even_under_a_new_seal(tmp_path: Path) -> None:
    run, _, _ = run_experiment(find_experiment(EXPERIMENT), tmp_path)
    lines = [json.loads(line) for line in (run.path / RECORDS).read_text().splitlines()]

    def rewrite(**values: Any) -> None:
        (run.path / RECORDS).write_text("".join(json.dumps(line | values) + "\n" for line in lines))
        seal(run.path)

    rewrite(kind="measured")
    with pytest.raises(BadInput, match="a measured number has no interval"):
        verdict(tmp_path)
    rewrite(kind="measured", low=None, high=None)
    with pytest.raises(IntegrityFailure, match="of mode simulate and yet calls a number measured"):
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


def test_simulated_and_computed_numbers_are_all_there_is_here(tmp_path: Path) -> None:
    for name in ("2021/table-1", "2021/table-2", "2021/figure-6", "2021/figure-8", "2019/table-1"):
        run, count, refused = run_experiment(find_experiment(name), tmp_path)
        records = read_records(run.path / RECORDS)
        assert len(records) == count
        assert refused == 0
        for record in records:
            assert record.kind in ("simulated", "computed")
            assert record.kind == "computed" or record.low <= record.value <= record.high  # type: ignore[operator]
        found = verdicts(tmp_path, name=name).values()
        for one in found:
            assert (one.outcome in ("simulated", "missed")) == (
                one.record is not None and one.record.kind == "simulated"
            )
            assert one.outcome in ("simulated", "missed", "consistent", "not-run"), one
        assert any(one.outcome == "consistent" for one in found)


def test_a_row_that_cannot_run_is_answered_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = "experiment,series,cluster,gpus,global_batch,micro_batch,hidden,heads,layers,seq,vocab,tp,dp,pp"
    rows = ["ptd-p/figure-11,B=8,dgx-a100-80g,4,8,1,20480,128,80,2048,51200,1,1,4",
            "ptd-p/figure-11,B=8,dgx-a100-80g,32,8,1,20480,128,12,2048,51200,8,1,8"]  # fmt: skip
    (tmp_path / "large-runs.csv").write_text("\n".join((header, *rows)) + "\n")
    monkeypatch.setattr("mlm_repro.experiments.published.HERE", tmp_path)
    run, numbers, refused = run_experiment(find_experiment(EXPERIMENT), tmp_path / "runs")
    assert (numbers, refused) == (0, 2)
    found = verdicts(run.path)
    assert "GiB of memory" in found["2021/figure-11/b=8/4"].reason
    assert "is not the 32 GPUs" in found["2021/figure-11/b=8/8"].reason
    assert {one.outcome for one in found.values()} == {"not-run"}


def test_a_simulated_number_says_whether_its_row_was_fitted(tmp_path: Path) -> None:
    """Figure 18 has Figure 12's interleaved workloads over again; Table 1 is held out but for two rows of vTrain."""
    notes = {}
    for name in ("2021/figure-11", "2021/figure-18", "2021/table-1"):
        run_experiment(find_experiment(name), tmp_path)
        simulated = [one for one in verdicts(tmp_path, name=name).values() if one.outcome in ("simulated", "missed")]
        notes[name] = {(one.claim.series, one.reason.split("; ")[-1]) for one in simulated}
    assert {note for _, note in notes["2021/figure-11"]} == {FITTED}
    assert {series for series, note in notes["2021/table-1"] if note == FITTED} == {"3.6B", "18.4B"}
    assert {note for _, note in notes["2021/figure-18"]} == {FITTED, HELD_OUT}


def test_every_claim_has_an_experiment_or_a_reason() -> None:
    open_claims = unanswered(load_experiments().values())
    assert {one.outcome for one in open_claims} == {"not-run", "of-others"}
    assert [one.claim.id for one in open_claims if one.reason == "no experiment runs it"] == []
    patterns = [pattern for rows in (unanswered_claims().context, unanswered_claims().missing) for row in rows
                for pattern in row.claims]  # fmt: skip
    for pattern in patterns:
        assert any(fnmatchcase(one.claim.id, pattern) for one in open_claims), f"{pattern} speaks of no open claim"


def test_a_number_of_a_smaller_model_does_not_stand_beside_the_published_one() -> None:
    rows = format_verdicts([*verdicts(ROOT / "results", name="2019/figure-6").values()]).splitlines()[1:-2]
    assert [row.split("  scaled  ")[0].split()[-1] for row in rows] == ["—"] * len(rows)


def test_the_same_numbers_are_not_written_twice(tmp_path: Path) -> None:
    first, *_ = run_experiment(find_experiment(EXPERIMENT), tmp_path)
    digest = first.digest
    again, *_ = run_experiment(find_experiment(EXPERIMENT), tmp_path)
    assert (again.path, again.digest) == (first.path, digest)


def test_the_kept_reproduction_is_scaled_at_the_same_share_of_training() -> None:
    found = verdicts(ROOT / "results", name="2019/figure-6")
    assert {(one.outcome, one.record and one.record.kind) for one in found.values()} == {("not-run", "scaled")}
    last = found["2019/figure-6/8.3b/300000"].record
    assert last is not None
    assert last.x == 1200


def test_the_commands(tmp_path: Path) -> None:
    machine = with_gpus(tmp_path / "bin", 0, 0)
    runs = tmp_path / "runs"
    done = call(machine, "mlm-experiment", "run", "--all", "--mode", "simulate", "--runs", runs, ends=0)
    assert re.fullmatch(r"cost: \d+ experiments one after the other, [^\n]+\n", done.err)
    unfinished = RunDirectory.begin(runs, "unfinished", "experiment", {"mode": "measure"}, {})
    write_records(unfinished.path / RECORDS, [])
    whole = call(machine, "mlm-experiment", "compare", "--all", "--results", runs)
    assert whole.code == 3, whole.out
    assert whole.err.startswith("error: 2019/blog/gpt-2-multiple and 6 more: ")
    table, said, errata, _ = whole.out.split("\n\n")
    assert all("; an erratum: " in line for line in errata.splitlines()[1:])
    head, *papers, total = table.splitlines()
    ends = [head.index(name) + len(name) for name in COLUMNS]
    cells = [total[end - len(name) : end].strip() for name, end in zip(COLUMNS, ends, strict=True)]
    rows = call(machine, "mlm-experiment", "compare", "--all", "--rows", "--results", runs).out
    for outcomes, cell in zip(COLUMNS.values(), cells, strict=True):
        given = [re.sub(r"  simulated +(simulated|missed) ", r"  \1 ", line) for line in rows.splitlines()[1:]]
        shown = [sum(f"  {named(outcome)}  " in line for line in given) for outcome in outcomes]
        assert cell == ("/".join(map(str, shown)) if any(shown) else ""), outcomes
    assert len(papers) >= 5
    for words in ("were fitted on themselves", "which says 90 %", "They need nothing: ", "numbers of others",
                  "left out: 1 directories that were never finished", "--rows"):  # fmt: skip
        assert words in said
    planted(runs, value=60)
    done = call(machine, "mlm-experiment", "compare", "--all", "--results", runs, ends=3)
    beyond = [line.split()[0] for line in done.out.splitlines() if "  not reproduced  " in line]
    assert beyond == ["paper", "2021/figure-11/b=8/4"]
    found = "error: 2019/blog/gpt-2-multiple and 7 more: the number found here is beyond the claim's tolerance\n"
    assert done.err == found
    done = call(machine, "mlm-experiment", "list", "--results", runs, ends=0)
    assert "1 not reproduced" in done.out


def test_every_claim_that_is_not_run_says_what_it_needs_and_reproduced_ones_a_fact() -> None:
    for verdict in (*judge(load_experiments().values(), KEPT), *unanswered(load_experiments().values())):
        assert verdict.outcome != "not-run" or verdict.needs in NEEDS
        assert verdict.outcome != "reproduced" or str(group_of(verdict.claim, FACTS)).endswith("."), verdict.claim.id


@pytest.mark.parametrize(("note", "outcome"), [(FITTED, "simulated"), (HELD_OUT, "missed")])
def test_a_prediction_whose_interval_leaves_the_number_out_has_missed(note: str, outcome: str, tmp_path: Path) -> None:
    planted(tmp_path, kind="simulated", value=130, low=125, high=135, note=note)
    assert verdict(tmp_path).outcome == outcome


def test_a_value_that_was_derived_here_is_a_check_and_no_reproduced_claim() -> None:
    found = judge(load_experiments().values(), KEPT)
    derived = {one.outcome for one in found if one.claim.confidence == "derived" and one.record}
    assert derived == {"consistent"}


def test_every_reproduced_verdict_could_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the last printed digit; an effect turns at a reversed sign, a verdict under a planted fault."""
    monkeypatch.setattr(mutation, "measure", lambda experiment: [])
    rows = mutation.mutate(KEPT).rows
    turned = [row.noticed[LAST_DIGIT] for row in rows if row.outcome == "reproduced"]
    assert sum(turned) >= 0.97 * len(turned) > 70
    signs = [row.noticed[SIGN] for row in rows if SIGN in row.noticed]
    assert all(signs)
    assert len(signs) > 3
    with mutation.planted("parameters") as words:
        biases = {one["series"]: one["value"] for one in measure(find_experiment("2019/table-1"))}
    right = {one["series"]: one["value"] for one in measure(find_experiment("2019/table-1"))}
    assert words == "biases are missing"
    assert all(biases[series] < right[series] for series in right)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["compare"], 2, "name an experiment"),
        (["compare", "2021/figure-99"], 2, "there is no experiment '2021/figure-99'"),
        (["compare", "--all", "--results", "nowhere"], 2, "nowhere is not a directory"),
        (["run", EXPERIMENT, "--mode", "here"], 4, "measured on the published machines alone"),
        (["run", "2019/table-3", "--mode", "simulate"], 2, "trained models, which nothing simulates"),
    ],
)
def test_a_mistake_gets_a_sentence(arguments: list[str], code: int, said: str, tmp_path: Path) -> None:
    done = call(with_gpus(tmp_path / "bin", 0, 0), "mlm-experiment", *arguments, ends=code)
    assert said in done.err
    assert done.err.count("\n") == 1
