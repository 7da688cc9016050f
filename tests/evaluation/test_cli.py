"""`mlm-eval`: what it prints and writes, and how it fails."""

import json
import math
import shutil
from pathlib import Path

import pytest

from mlm_repro.data_pipeline.contamination.testsets import TEST_SETS
from mlm_repro.evaluation.tasks.documents import RunningText
from mlm_repro.lineage.digest import read_digest
from tests.commands import Command
from tests.evaluation.standins import write_run


def test_wikitext103_on_a_file_that_passes_for_the_published(
    run: Path, made_passes_for_published: RunningText, tmp_path: Path, mlm_eval: Command
) -> None:
    target = tmp_path / "deep" / "result.json"
    arguments = (
        "wikitext103",
        "--ckpt",
        run,
        "--json",
        target,
        "--limit",
        7,
        "--set",
        "batch_size=2",
        "--set",
        "workers=2",
    )
    done = mlm_eval(*arguments, ends=0)
    result = json.loads(target.read_text())
    checkpoint = run / "checkpoints" / "iter_0000010"
    assert result["task"] == "wikitext103"
    assert result["kind"] == "scaled"
    assert result["partial"] is True
    assert result["note"] == ""
    assert result["num_original_tokens"] == made_passes_for_published.num_original_tokens
    assert result["num_scored_tokens"] == 14
    assert result["checkpoint_digest"] == read_digest(checkpoint)
    assert result["data_digest"] == TEST_SETS["wikitext103"].sha256
    assert result["dtype"] == "float32"
    assert "detokenizer megatron-wikitext; window 64, stride 2" in result["protocol"]
    assert result["perplexity"] == pytest.approx(
        math.exp(result["loss_per_token"] * 14 / result["normaliser"]), rel=1e-9
    )
    assert set(result) >= {
        "num_tokens",
        "tokenizer_digest",
        "seconds",
        "environment",
        "megatron",
        "warnings",
    }
    for words in (result["protocol"], "PARTIAL", "scaled, partial"):
        assert words in done.out


@pytest.mark.parametrize("task", ["wikitext103", "lambada"])
@pytest.mark.parametrize(
    ("damage", "code", "sentence"),
    [
        ("no checkpoint", 2, "there is no checkpoint"),
        ("other test file", 6, "is not"),
        ("no data", 5, "no held-out documents stand in"),
        ("json is a directory", 2, "is a directory"),
    ],
)
def test_failures_are_one_sentence_and_leave_nothing(
    task: str,
    damage: str,
    code: int,
    sentence: str,
    tmp_path: Path,
    nothing_published: Path,
    mlm_eval: Command,
) -> None:
    run = write_run(tmp_path / "runs")
    checkpoint, target = run / "checkpoints" / "iter_0000010", tmp_path / "out" / "result.json"
    match damage:
        case "no checkpoint":
            checkpoint = tmp_path / "nowhere"
        case "other test file":
            for name in ("wikitext-103/wiki.test.tokens", "lambada/lambada_test.jsonl"):
                (nothing_published / name).parent.mkdir()
                (nothing_published / name).write_text('{"text": "not the published file"}\n')
        case "no data":
            shutil.rmtree(tmp_path / "runs" / "words")
        case "json is a directory":
            target.mkdir(parents=True)
    done = mlm_eval(task, "--ckpt", checkpoint, "--json", target, "--limit", 3, ends=code)
    assert sentence in done.error
    assert damage == "json is a directory" or not target.parent.exists()


@pytest.mark.parametrize("option", ["--limit=0", "--set=batch_size=0", "--set=workers=0"])
def test_counts_must_be_positive(run: Path, option: str, mlm_eval: Command) -> None:
    assert mlm_eval("lambada", "--ckpt", run, option).code == 2
