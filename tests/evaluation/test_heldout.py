"""What stands in where the published test files cannot be had."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mlm_repro.evaluation.evaluate import Settings, evaluate
from mlm_repro.evaluation.models.places import Place
from mlm_repro.evaluation.schema import ClozeResult, PerplexityResult
from mlm_repro.evaluation.tasks.heldout import (
    cut_passages,
    file_cloze,
    file_perplexity,
    read_documents,
)
from mlm_repro.evaluation.tasks.names import build_task
from mlm_repro.lineage.digest import seal, sha256_file
from mlm_repro.lineage.errors import BadInput, DataMissing, IntegrityFailure
from tests.evaluation.standins import Bytes, sentences, write_run


def wikitext103(run: Path, limit: int | None = None) -> PerplexityResult:
    result = (
        evaluate(
            Place.find(run), {"it": partial(build_task, "wikitext103")}, Settings(workers=1), limit
        )
        .done["it"]
        .result
    )
    assert isinstance(result, PerplexityResult)
    return result


def lambada(run: Path, limit: int | None = None) -> ClozeResult:
    result = (
        evaluate(
            Place.find(run), {"it": partial(build_task, "lambada")}, Settings(workers=1), limit
        )
        .done["it"]
        .result
    )
    assert isinstance(result, ClozeResult)
    return result


@pytest.fixture
def dataset(run: Path) -> Path:
    return run.parent / "words"


def test_passages_are_consecutive_and_long_enough() -> None:
    words = [f"w{number}" for number in range(64 + 64 + 45)]
    text = "  " + "\n ".join(words) + " "
    passages = list(cut_passages(text))
    assert [len(passage.split()) for passage in passages] == [64, 64, 45]
    assert [word for passage in passages for word in passage.split()] == words
    assert passages[0].startswith("w0\n w1")
    assert [len(passage.split()) for passage in cut_passages(" ".join(words[: 64 + 39]))] == [64]
    assert list(cut_passages("too short")) == []


def test_wikitext103_falls_back_under_another_name_and_says_so(
    run: Path, dataset: Path, nothing_published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = wikitext103(run, limit=20)
    assert result.task == "heldout-perplexity"
    assert "NOT WikiText-103" in result.note
    assert "not WikiText-103" in result.protocol
    assert "NOT WikiText-103" in capsys.readouterr().err
    assert result.data_digest == sha256_file(dataset / "documents" / "valid.jsonl")
    text = "\n\n".join(sentences(40))
    assert result.num_original_tokens == len(text.strip().split(" "))
    assert "detokenizer none; window 64, stride 2" in result.protocol


def test_lambada_falls_back_under_another_name_and_says_so(
    run: Path, nothing_published: Path
) -> None:
    result = lambada(run)
    assert result.task == "heldout-cloze"
    assert "NOT LAMBADA" in result.note
    expected = sum(len(list(cut_passages(text))) for text in sentences(40))
    assert result.num_examples == result.num_original_tokens == expected > 10
    assert not result.partial


def test_a_dataset_that_moved_beside_the_run_is_found(
    tmp_path: Path, nothing_published: Path
) -> None:
    run = write_run(tmp_path / "runs")
    moved = shutil.move(tmp_path / "runs", tmp_path / "elsewhere")
    assert lambada(Path(moved) / run.name, limit=2).task == "heldout-cloze"


@pytest.mark.parametrize("damage", ["gone", "replaced", "no manifest"])
def test_without_the_training_dataset_the_data_is_missing(
    tmp_path: Path, nothing_published: Path, damage: str
) -> None:
    run = write_run(tmp_path / "runs")
    dataset = tmp_path / "runs" / "words"
    if damage == "gone":
        shutil.rmtree(dataset)
    elif damage == "replaced":
        (dataset / "documents" / "valid.jsonl").write_text(
            '{"id": "0", "text": "seen in training"}\n'
        )
        seal(dataset)
    else:
        (run / "manifest.json").unlink()
    with pytest.raises(DataMissing, match=r"wiki\.test\.tokens.*no held-out documents stand in"):
        wikitext103(run)


def test_documents_that_are_not_documents(tmp_path: Path) -> None:
    path = tmp_path / "documents" / "valid.jsonl"
    with pytest.raises(DataMissing):
        read_documents(tmp_path)
    path.parent.mkdir()
    path.write_text(json.dumps({"id": 1, "text": " "}) + "\n")
    with pytest.raises(DataMissing, match="holds no text"):
        read_documents(tmp_path)
    path.write_text('{"id": 1}\n')
    with pytest.raises(IntegrityFailure, match="not a file of documents"):
        read_documents(tmp_path)


@pytest.mark.parametrize("read", [file_perplexity, file_cloze])
def test_a_text_without_end_is_refused(tmp_path: Path, read: Callable[..., object]) -> None:
    path = tmp_path / "line.txt"
    with path.open("wb") as file:
        file.truncate(300 << 20)
    os.mkfifo(tmp_path / "pipe.txt")
    for text in (path, tmp_path / "pipe.txt"):
        with pytest.raises(BadInput, match="cannot be read"):
            read(text, Bytes(), 64)
