"""`mlm-bench data`: every answer is compared, and a wrong one is found."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from experiments.bench.data import core_hours, measure_stage, whole_row
from experiments.bench.data_memory import memory_bound_bytes
from experiments.bench.data_stages import cleaning, pairs_of_buckets, pairs_of_queries

TEXTS = [topics[name] for name in sorted(topics)][:40]
STAGES = ["clean", "language", "encode", "signatures", "group", "verify", "decontaminate"]


def bench(name: str, corpus: Path, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """`mlm-bench NAME` where test sets and a vocabulary can only be in the folder `data` beside the corpus."""
    here = corpus.parent
    alone = {"MLM_DATA_DIR": str(here / "data"), "HOME": str(here), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("mlm-bench")), name, f"--corpus={corpus}", *map(str, arguments)],
        capture_output=True, text=True, timeout=600,
        env=os.environ | alone | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"},
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def run(made_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The result on documents of which five come twice, one hardly changed, and what was printed."""
    folder = tmp_path_factory.mktemp("bench")
    shutil.copytree(made_data, folder / "data", ignore=shutil.ignore_patterns("gpt2-bpe"))
    texts = [*TEXTS, *TEXTS[:5], TEXTS[7].replace("the", "thé", 3)]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "corpus.jsonl").write_text("\n".join([*lines, "not json"]) + "\n", encoding="utf-8")
    done = bench("data", folder / "corpus.jsonl", "--json", folder / "data.json")
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "data.json").read_text(encoding="utf-8")), done.stdout


def test_every_stage_is_compared_and_nothing_differs(run: tuple[dict[str, Any], str]) -> None:
    result, printed = run
    rows = {row["stage"]: row for row in result["stages"]}
    assert list(rows) == STAGES
    assert (result["corpus"]["documents"], result["corpus"]["malformed"]) == (len(TEXTS) + 6, 1)
    assert rows["clean"]["compared"] == len(TEXTS) + 6
    assert rows["group"]["compared"] >= rows["verify"]["compared"] >= 6
    assert all(row["differing"] == 0 and row["ours_seconds"] > 0 for row in rows.values())
    assert result["whole"]["differing"] == 0
    assert result["environment"]["argv"] == ["mlm-bench", "data", "--corpus=corpus.jsonl"]
    assert 0 < result["whole"]["documents"] <= len(TEXTS)
    assert result["whole"]["plain_seconds"] == pytest.approx(
        sum(row["plain_seconds"] for row in rows.values()), abs=1e-2
    )
    for name in [*STAGES, "whole"]:
        assert name in printed


def test_without_gpt2s_vocabulary_the_corpus_gives_one_and_the_result_says_so(run: tuple[dict[str, Any], str]) -> None:
    result, printed = run
    assert result["vocabulary"] == "4,096 tokens, trained by the whole run, as GPT-2's vocabulary is not here"
    assert result["vocabulary"] in " ".join(printed.split())


def test_a_wrong_answer_is_found() -> None:
    stage = cleaning()
    wrong = replace(stage, ours=lambda texts: [text.replace("“", "'") for text in stage.ours(texts)])
    assert measure_stage(stage, ["a “b” c", "d"])[0]["differing"] == 0
    assert measure_stage(replace(wrong, plain=lambda texts: list(texts)), ["a “b” c", "d"])[0]["differing"] == 1


def test_buckets_and_queries_are_pairs() -> None:
    assert pairs_of_buckets([([3, 5, 8, 1, 2], [0, 3, 5]), ([3, 5], [0, 2])]) == {(3, 5), (3, 8), (5, 8), (1, 2)}
    assert pairs_of_queries([[], [0], [], [0, 1]]) == {(0, 1), (0, 3), (1, 3)}


def test_a_corpus_that_costs_hardly_more_than_starting_has_no_ratio(run: tuple[dict[str, Any], str]) -> None:
    row = whole_row(40.0, 7.0, 5.0, 14.0)
    assert (row["ratio"], row["megabytes_per_second"]) == (20.0, 7.0)
    for seconds in (4.9, 5.0, 6.2):
        assert whole_row(40.0, seconds, 5.0, 14.0)["ratio"] is None
    ratio = run[0]["whole"]["ratio"]
    assert ("too small" in run[1]) == (ratio is None)
    assert ratio is None or ratio > 0


def test_core_hours_are_those_of_the_papers_corpus() -> None:
    assert core_hours(3600, 174_000) == pytest.approx(1)


@pytest.mark.parametrize("content", ["", "not json\n", '{"text": "too short"}\n'])
def test_a_corpus_that_is_too_small_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(content, encoding="utf-8")
    done = bench("data", tmp_path / "corpus.jsonl")
    assert done.returncode == 2
    assert "too little of the corpus is left" in done.stderr
    assert bench("data", tmp_path / "missing.jsonl").returncode == 2


def test_scale_is_measured_within_the_bound(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in topics.values()]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines), encoding="utf-8")
    scale = tmp_path / "scale.json"
    done = bench("data-scale", tmp_path / "corpus.jsonl", f"--json={scale}", "--megabytes=20", "--workers=1")
    assert done.returncode == 0, done.stderr
    result = json.loads(scale.read_text(encoding="utf-8"))
    [row] = result["rows"]
    assert row["megabytes"] == pytest.approx(20, rel=0.05)
    assert row["megabytes_per_second"] > 0
    assert row["bound_bytes"] == memory_bound_bytes(row["documents"], row["largest_document_bytes"], 1)
    assert 100e6 < row["peak_bytes"] <= row["bound_bytes"]
    assert str(tmp_path) not in json.dumps(result)
    assert result["environment"]["argv"] == [
        "mlm-bench", "data-scale", "--corpus=corpus.jsonl", "--megabytes=20", "--workers=1"
    ]  # fmt: skip
