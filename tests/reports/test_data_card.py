"""The data card, the evaluations and the benchmarks on the page: their numbers, and what becomes of bad files."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.files import Amount, Ledger, NearDuplicates, StageAttrition
from lineage.errors import BadInput
from reports.benchmarks import load_benchmarks
from reports.data_card import banding_caption, dropped_most, recalls
from reports.load import load_reproduction
from tests.architecture.rooms import ROOT
from tests.commands import call
from tests.reports.conftest import Built
from tests.reports.reproduction import (
    benchmarks,
    evaluation,
    near_duplicates,
    page_text,
    write_benchmarks,
    write_reproduction,
)
from tests.reports.test_page import Outline, _rows


def test_the_card_shows_settings_digests_and_versions(built: Built) -> None:
    rows = _rows(built.html)
    assert ["length", "min tokens 128"] in rows
    assert f'sample, bytes 0 to 1,000: 4,000 documents, SHA-256 <code title="{"cd" * 32}">' in built.html
    assert f'train_text_document.bin, 2.00 MB, SHA-256 <code title="{"ab" * 32}">' in built.html
    assert "f0" * 32 in built.html
    assert "langdetect 1.0.9, seed 0, python 3.11.7" in built.html
    assert "2 blank ones passed over" in built.html


def test_the_card_says_why_documents_were_dropped(built: Built) -> None:
    assert "Most are dropped by the stage length: 633 of the 3,747 that reach it (16.9 %)" in built.html


def test_short_documents_are_said_to_be_short() -> None:
    lost = {"fewer than 128 tokens": Amount(documents=60, tokens=1200)}
    kept = StageAttrition(name="source", documents_in=100, documents_out=100)
    stage = StageAttrition(
        name="length", documents_in=100, documents_out=40, tokens_in=10_000, tokens_out=8_800, dropped=lost
    )
    sentence = dropped_most(Ledger(stages=[kept, stage]))
    assert "60 of the 100 that reach it (60.0 %), above all for this reason: fewer than 128 tokens." in sentence
    assert "They have 20 tokens on average, those that stay 220: all together they are 12.0 % of the tokens" in sentence
    without = stage.model_copy(update={"dropped": {"too short": Amount(documents=60, tokens=None)}})
    assert dropped_most(Ledger(stages=[without])).endswith("above all for this reason: too short.")
    assert dropped_most(Ledger(stages=[kept])) == "No stage dropped a document."


def test_the_caption_counts_the_pairs_at_or_above_the_threshold() -> None:
    found = NearDuplicates.model_validate(near_duplicates())
    assert "; 24 (60.0 %) lie at or above the threshold of 0.7." in banding_caption(found)[1]
    between = NearDuplicates.model_validate(near_duplicates() | {"threshold": 0.72})
    assert "; at least 20 (50.0 %) lie" in banding_caption(between)[1]


def test_no_recall_is_rounded_up_to_certainty() -> None:
    found = NearDuplicates.model_validate(near_duplicates() | {"expected_recall": {"0.7": 0.99994, "0.9": 1.0}})
    assert recalls(found) == ["over 0.9999 at 0.7", "1.0000 at 0.9"]


def test_evaluations_show_every_convention_with_its_standard_error(built: Built) -> None:
    rows = _rows(built.html)
    numbers = ["644 ± 64", "88.25", "643.8", "721.5", "1.520 ± 0.024", "c" * 16]
    assert ["8.3b", "wikitext103", "● scaled partial", *numbers] in rows
    cells = ["1.25 ± 0.15 %", "5 of 400", "-6.47 ± 0.10", "644 ± 64", "c" * 16]
    assert ["8.3b", "lambada", "● scaled partial", *cells] in rows


def test_ratios_stand_beside_their_goals(built: Built) -> None:
    rows = _rows(built.html)
    assert ["tiny fp32", "× stock nanoGPT", "1.40", "1.20 to 1.60", "at least 1.5, missed"] in rows
    assert ["tiny fp32", "of its memory", "0.40", "0.40 to 0.60", "at most 0.5"] in rows
    assert ["tiny fp32", "without a goal", "3.00", "—", "—"] in rows
    assert ["tiny fp32", "lm-evaluation-harness", "not installed"] in rows
    assert "1 of 2 goals were reached." in built.html
    assert "Missed: tiny fp32, × stock nanoGPT (1.40, goal 1.5)." in built.html
    assert "model: layers 2, width 64" in built.html
    assert ["h100", "12.50"] in rows
    assert "Load average of the machine meanwhile: up to 4.2 on 2 cores." in built.html
    assert "the smoothed loss is lowest at 0.01; a tenth of that, 0.001, is suggested" in built.html
    path = built.page.parent / "figures" / "bench-train.csv"
    with path.open(encoding="utf-8", newline="") as file:
        values = [
            row["value"] for row in csv.DictReader(file) if (row["contender"], row["measure"]) == ("ours", "rate")
        ]
    assert values == ["900", "1000", "1200"]


def test_a_benchmark_that_the_page_does_not_know_is_shown(built: Built) -> None:
    assert '<figure id="bench-of-a-new-kind">' in built.html
    assert ["a case", "faster", "1.25", "—", "—"] in _rows(built.html)


def test_every_kept_benchmark_is_shown() -> None:
    found = load_benchmarks(ROOT / "results" / "bench")
    assert not found.problems
    assert len(found.exhibits) == len(list((ROOT / "results" / "bench").iterdir()))
    for exhibit in found.exhibits:
        assert exhibit.tables
        assert all(len(row) == len(table.heads) for table in exhibit.tables for row in table.rows)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "\xff",
        '{"benchmark": "other"}',
        '{"benchmark": ["data"]}',
        '{"benchmark": "other", "title": "t", "cases": []}',
        '{"benchmark": "other", "title": "t", "cases": [{"name": "a\\u0000b"}]}',
        '{"benchmark": "other", "title": "t", "cases": [{"name": "a", "losse": {}}]}',
        '{"benchmark": "other", "title": "t", "cases": [{"name": "a", "ratios": [{"name": "r", "value": NaN}]}]}',
        '{"benchmark": "learning-rate", "name": "x", "optimizer": "adam", "global_batch_size": 1, "seed": 1,'
        ' "rates": [1], "losses": [], "smoothed": [1], "lowest_rate": null, "suggestion": null}',
    ],
)
def test_a_bad_benchmark_is_one_sentence_and_the_rest_is_read(tmp_path: Path, text: str) -> None:
    path = write_benchmarks(tmp_path)
    (path / "bad.json").write_bytes(text.encode("latin-1"))
    found = load_benchmarks(path)
    assert len(found.exhibits) == len(benchmarks())
    (problem,) = found.problems
    assert problem.damaged
    assert problem.sentence.startswith("A benchmark cannot be shown: ")
    assert "bad.json" in problem.sentence


def test_two_results_of_one_benchmark_are_both_shown(tmp_path: Path) -> None:
    path = write_benchmarks(tmp_path)
    (path / "train-again.json").write_bytes((path / "train.json").read_bytes())
    names = [one.name for one in load_benchmarks(path).exhibits]
    assert len(set(names)) == len(benchmarks()) + 1


def test_a_folder_that_is_none_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        load_benchmarks(tmp_path / "absent")


def test_the_command_ends_with_6_for_a_bad_benchmark(tmp_path: Path) -> None:
    path, bench = write_reproduction(tmp_path), write_benchmarks(tmp_path)
    command = ("mlm-report", "build", path, "--bench", bench, "--quiet")
    good = call({}, *command)
    assert (good.code, good.err) == (0, "")
    (bench / "bad.json").write_text("{")
    bad = call({}, *command, ends=6)
    assert "bad.json" in bad.err
    html = (path / "report" / "index.html").read_text(encoding="utf-8")
    assert "A benchmark cannot be shown: bad.json" in html
    assert '<figure id="bench-train"' in html
    assert Outline(html).balanced


def test_an_older_reproduction_says_what_it_does_not_keep(tmp_path: Path) -> None:
    path = write_reproduction(tmp_path, sealed=False)
    (path / "dataset.json").unlink()
    ledger: dict[str, Any] = json.loads((path / "ledger.json").read_text(encoding="utf-8"))
    for key in ("near_duplicates", "shards", "blank_lines"):
        del ledger[key]
    (path / "ledger.json").write_text(json.dumps(ledger))
    assert "data_repository" not in evaluation()
    reproduction = load_reproduction(path)
    assert not any(problem.damaged for problem in reproduction.problems)
    html = page_text(path)
    assert "keeps no data card (dataset.json)" in html
    assert "the S-curve is not drawn" in html
    assert '<figure id="data-ledger"' in html
    assert 'id="benchmarks"' not in html


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("dataset.json", "The data card cannot be shown"),
        ("evaluations/8.3b-wikitext103.json", "An evaluation cannot be shown"),
    ],
)
def test_a_corrupted_file_is_named_in_its_place(tmp_path: Path, name: str, sentence: str) -> None:
    path = write_reproduction(tmp_path)
    (path / name).write_text("{")
    reproduction = load_reproduction(path)
    assert sum(problem.damaged for problem in reproduction.problems) == 2
    html = page_text(path)
    assert sentence in html
    assert f"{name} is not the file that was sealed" in html
    assert '<figure id="near-duplicates"' in html
    assert Outline(html).balanced
