"""The hub's real clients against a small hub on this machine: models, corpora and test sets come,
resume and are refused with one sentence."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from mlm_repro.data_pipeline.reading.hub import LOCATIONS
from tests.commands import Outcome, call
from tests.data_pipeline.conftest import write_recipe
from tests.evaluation.test_harness import directory  # noqa: F401
from tests.hub_server import COMMIT, Hub, serving
from tests.made_data import without_wikitext2

pytest.importorskip("transformers")
OLDER = "f" * 40
TEXT = """
the of and that with when after many people found their house by water under long winter nights
because every river has another bridge where children used to play while older men were reading
about distant countries before dinner which nobody would have believed had she never written such a
letter from her small garden during these quiet months
"""
ENGLISH = TEXT.split()


@pytest.fixture
def hub(tmp_path: Path, directory: Path) -> Iterator[Hub]:  # noqa: F811
    shutil.copytree(directory, tmp_path / "hub" / "models" / "openai-community" / "gpt2")
    with serving(tmp_path / "hub") as served:
        yield served


def ask(hub: Hub, *command: object, ends: int) -> Outcome:
    name, *arguments = command
    return call(hub.environment, str(name), *arguments, ends=ends)


def put_dataset(hub: Hub, repository: str, subset: str, splits: dict[str, list[list[str]]]) -> Path:
    """Parquet files with a column `text`, laid out as the hub's repositories are."""
    folder = hub.root / "datasets" / repository
    (folder / subset).mkdir(parents=True)
    for split, files in splits.items():
        for number, texts in enumerate(files):
            path = folder / subset / f"{split}-{number:05}-of-{len(files):05}.parquet"
            pq.write_table(pa.table({"text": texts}), path)
    described = "".join(f"  - split: {split}\n    path: {subset}/{split}-*\n" for split in splits)
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {subset}\n  data_files:\n{described}---\n"
    )
    return folder


def test_a_model_is_fetched_with_its_digests_after_a_cut_and_a_busy_answer(
    hub: Hub, tmp_path: Path
) -> None:
    weights = hub.root / "models" / "openai-community" / "gpt2" / "model.safetensors"
    hub.cut_after["model.safetensors"] = weights.stat().st_size // 2
    hub.busy["config.json"] = 1
    out = tmp_path / "models"
    fetch = ("mlm-eval", "fetch", "openai-community/gpt2", "--out", out)
    assert f"written: {out / 'gpt2'}" in ask(hub, *fetch, ends=0).out
    assert load_file(out / "gpt2" / "model.safetensors").keys() == load_file(weights).keys()
    record = json.loads((out / "gpt2" / "fetched.json").read_text())
    assert (record["repository"], record["commit"]) == ("openai-community/gpt2", COMMIT)
    assert record["files"]["model.safetensors"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    hub.requests.clear()
    ask(hub, *fetch, ends=0)
    assert not [
        request for request in hub.requests if request[0] == "GET" and "/resolve/" in request[1]
    ]
    mine = out / "gpt2" / "model.safetensors"
    mine.write_bytes(b"other")
    os.utime(mine, (0, 0))  # the client believes that it is the file it wrote
    assert "model.safetensors is not what the hub has" in ask(hub, *fetch, ends=6).error
    mine.unlink()
    ask(hub, *fetch, ends=0)
    assert mine.read_bytes() == weights.read_bytes()


def test_a_file_that_is_damaged_on_the_way_is_not_taken(hub: Hub, tmp_path: Path) -> None:
    hub.damaged.add("model.safetensors")
    done = ask(hub, "mlm-eval", "fetch", "openai-community/gpt2", "--out", tmp_path, ends=6)
    assert "model.safetensors is not what the hub has" in done.error
    assert not (tmp_path / "gpt2" / "fetched.json").exists()


def test_a_pinned_revision_is_asked_for(hub: Hub, tmp_path: Path) -> None:
    hub.revisions["v1"] = OLDER
    ask(hub, "mlm-eval", "fetch", "openai-community/gpt2@v1", "--out", tmp_path, ends=0)
    assert json.loads((tmp_path / "gpt2" / "fetched.json").read_text())["commit"] == OLDER
    absent = ask(hub, "mlm-eval", "fetch", "openai-community/gpt2@v2", "--out", tmp_path, ends=5)
    assert absent.error.startswith(
        "error: the Hugging Face hub has no model openai-community/gpt2@v2"
    )


@pytest.mark.parametrize(
    ("name", "fault", "code", "words"),
    [
        ("openai-community/none", "", 5, "the Hugging Face hub has no model openai-community/none"),
        (
            "openai-community/gpt2",
            "gated",
            5,
            "is given only to accounts that accept its terms: accept them on its page there",
        ),
        ("openai-community/gpt2", "busy", 7, "could not be read from the Hugging Face hub"),
        ("g p t", "", 2, "g p t is not a name on the Hugging Face hub"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(
    hub: Hub, tmp_path: Path, name: str, fault: str, code: int, words: str
) -> None:
    if fault == "gated":
        hub.gated.add(name)
    if fault == "busy":
        hub.busy["api/models"] = 100
    done = ask(hub, "mlm-eval", "fetch", name, "--out", tmp_path / "out", ends=code)
    assert words in done.error
    assert len(done.error.splitlines()) == 1


def test_a_model_is_evaluated_by_name_and_offline_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the river sleeps under the old house " * 20)
    command = (
        "mlm-eval",
        "perplexity",
        text,
        "--ckpt",
        "openai-community/gpt2",
        "--set",
        "workers=1",
    )
    first = ask(hub, *command, "--json", tmp_path / "first.json", ends=0)
    assert "openai-community/gpt2" in (tmp_path / "first.json").read_text()
    hub.requests.clear()
    offline = {**hub.environment, "HF_HUB_OFFLINE": "1"}
    again = call(offline, *map(str, command), "--json", str(tmp_path / "again.json"), ends=0)
    assert not hub.requests
    numbers = [
        json.loads((tmp_path / f"{name}.json").read_text())["perplexity"]
        for name in ("first", "again")
    ]
    assert numbers[0] == numbers[1], (first.out, again.out)
    missing = call(
        offline, "mlm-eval", "perplexity", str(text), "--ckpt", "openai-community/other", ends=2
    )
    assert "is not in the hub's cache, and the hub cannot be reached" in missing.error


def test_weights_of_other_formats_are_fetched_by_name(hub: Hub, tmp_path: Path) -> None:
    """A repository with .bin files alone, and one with GGUF files, of which only a single one is
    clear."""
    import torch
    from safetensors.torch import load_file as load_tensors

    models = hub.root / "models" / "openai-community"
    shutil.copytree(models / "gpt2", models / "older")
    torch.save(
        load_tensors(models / "older" / "model.safetensors"), models / "older" / "pytorch_model.bin"
    )
    (models / "older" / "model.safetensors").unlink()
    text = tmp_path / "text.txt"
    text.write_text("the river sleeps under the old house " * 20)
    numbers = []
    for name in ("gpt2", "older"):
        target = tmp_path / f"{name}.json"
        asked = (
            "perplexity",
            text,
            "--ckpt",
            f"openai-community/{name}",
            "--set",
            "workers=1",
            "--json",
            target,
        )
        ask(hub, "mlm-eval", *asked, ends=0)
        numbers.append(json.loads(target.read_text())["perplexity"])
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)  # by the engine, and by transformers
    (models / "packed").mkdir()
    (models / "packed" / "a.gguf").write_bytes(b"GGUF")
    done = ask(
        hub, "mlm-eval", "fetch", "openai-community/packed", "--out", tmp_path / "out", ends=0
    )
    assert (tmp_path / "out" / "packed" / "a.gguf").is_file(), done.out
    (models / "packed" / "b.gguf").write_bytes(b"GGUF")
    several = ask(
        hub, "mlm-eval", "fetch", "openai-community/packed", "--out", tmp_path / "both", ends=2
    )
    assert "has 2 GGUF files: fetch one of them and give its path (a.gguf, …)" in several.error


def test_a_corpus_is_streamed_from_the_layout_of_its_repository(hub: Hub, tmp_path: Path) -> None:
    random_words = random.Random(1)
    texts = [[" ".join(random_words.choices(ENGLISH, k=300)) for _ in range(2)] for _ in range(3)]
    put_dataset(hub, "wikimedia/wikipedia", "20231101.en", {"train": texts})
    hub.revisions["20231101"] = str(LOCATIONS["wikipedia"].revision)
    recipe = write_recipe(
        tmp_path / "recipe.toml", "wikipedia", extra="decontaminate.test_sets = []"
    )
    done = ask(hub, "mlm-data", "run", recipe, "--runs", tmp_path / "runs", ends=0)
    assert "documents" in done.out
    ledger = json.loads(next((tmp_path / "runs").glob("small-*/ledger.json")).read_text())
    assert ledger["stages"][0]["documents_in"] == 6
    assert any(
        range_ for _, path, range_ in hub.requests if path.endswith("train-00002-of-00003.parquet")
    )
    assert not any(COMMIT in path for _, path, _ in hub.requests)


def test_a_corpus_that_the_hub_does_not_give(hub: Hub, tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path / "recipe.toml", "wikipedia", extra="decontaminate.test_sets = []"
    )
    done = ask(hub, "mlm-data", "run", recipe, "--runs", tmp_path / "runs", ends=5)
    assert "the Hugging Face hub has no wikipedia" in done.error


def test_the_published_files_are_fetched_from_the_layout_of_their_repositories(
    hub: Hub, tmp_path: Path, published: Path
) -> None:
    """The rows that the hub has are cut from the files, and joined into the same bytes."""
    lines = {
        split: (
            (published / "wikitext-103" / f"wiki.{name}.tokens")
            .read_text("utf-8")
            .splitlines(keepends=True)
        )
        for split, name in (("test", "test"), ("validation", "valid"))
    }
    rows = {
        split: [["" if line == " \n" else line for line in each]] for split, each in lines.items()
    }
    put_dataset(hub, "Salesforce/wikitext", "wikitext-103-v1", rows)
    passages = (published / "lambada" / "lambada_test.jsonl").read_text("utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in passages]
    put_dataset(hub, "EleutherAI/lambada_openai", "default", {"test": [texts]})
    plain = (published / "lambada" / "lambada_test_plain_text.txt").read_text("utf-8").splitlines()
    put_dataset(hub, "cimec/lambada", "plain_text", {"test": [plain]})
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(
            published / "gpt2-bpe" / name, hub.root / "models" / "openai-community" / "gpt2"
        )
    home = {"HOME": str(tmp_path), "MLM_DATA_DIR": ""}
    out = tmp_path / "data"
    done = call(
        hub.environment | home, "mlm-data", "fetch", str(out), ends=0, prepare=without_wikitext2
    )
    assert done.out.count("written: ") == 7
    for line in (out / "SHA256SUMS").read_text().splitlines():
        digest, place = line.split("  ")
        assert hashlib.sha256((out / place).read_bytes()).hexdigest() == digest
