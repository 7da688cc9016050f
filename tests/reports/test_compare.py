"""`mlm-report compare`: every difference between two runs of a kind, and nothing that is equal."""

import json
from functools import partial
from pathlib import Path

import pytest

from lineage.atomic import write_json
from reports.compare import compare
from tests.commands import call
from tests.reports.reproduction import write_reproduction
from tests.reports.trained import write_run

run_compare = partial(call, {"COLUMNS": "140"}, "mlm-report", "compare")


def test_settings_inputs_and_code_that_differ_are_all_that_is_listed(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=5, learning_rate=0.1)
    manifest = json.loads((other / "manifest.json").read_text(encoding="utf-8"))
    manifest["parents"]["dataset"] = "e" * 64
    manifest["environment"]["source"]["commit"] = "1" * 40
    manifest["environment"]["packages"]["torch"] = "2.1"
    write_json(other / "manifest.json", manifest)
    assert compare(one, other).done == [
        ("config.train.learning_rate", "—", "0.1"),
        ("config.train.seed", "1234", "5"),
        ("input.dataset", "d" * 16, "e" * 16),
        ("code.source.commit", "0" * 40, "1" * 40),
        ("machine.packages.torch", "2.0", "2.1"),
    ]


def test_results_stand_beside_each_other_also_of_a_run_in_progress(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "a"), write_run(tmp_path / "b", iterations=15)
    results = {name: values for name, *values in compare(one, other).results}
    assert results["iterations"] == [40, 15]
    assert results["training loss"] == [5.0, 6.25]
    assert results["validation perplexity"] == [1000 / 41, 1000 / 11]
    assert results["validation perplexity, whole split"] == [1000 / 41, None]
    done = run_compare(one, other)
    assert (done.code, done.err) == (0, "")
    assert "+1.25" in done.out
    assert "1.2500" in done.out
    assert "settings, inputs, code and machine are equal" in done.out


def test_two_reproductions_are_compared_by_their_records(tmp_path: Path) -> None:
    one, other = write_reproduction(tmp_path / "a"), write_reproduction(tmp_path / "b", sealed=False)
    text = (other / "records.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        if line["kind"] != "published":
            line["value"] *= 2
    (other / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    results = compare(one, other).results
    assert any(name == "8.3b validation perplexity" for name, *_ in results)
    for _, first, second in results:
        assert first is not None
        assert second == pytest.approx(2 * first)


def test_what_cannot_be_compared_is_refused_in_a_sentence(tmp_path: Path) -> None:
    run, reproduction = write_run(tmp_path / "a"), write_reproduction(tmp_path / "b")
    for arguments, code, sentence in (
        ((run, reproduction), 2, "compare two of one kind"),
        ((run, tmp_path / "absent"), 2, "is not a run directory"),
        ((run, tmp_path), 2, "is not a run directory"),
    ):
        done = run_compare(*arguments, ends=code)
        assert sentence in done.err
        assert len(done.err.splitlines()) == 1


def test_a_damaged_part_is_named_and_the_rest_compared(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    (other / "summary.json").write_text("{", encoding="utf-8")
    done = run_compare(one, other, ends=6)
    assert "The summary of small-0123abcd cannot be shown" in done.err
    assert "training loss" in done.out
