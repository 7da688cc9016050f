"""A whole dataset: its files, its ledger, and that nothing but the input decides it."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.data_pipeline.fast.exact_ftfy import fix_text
from mlm_repro.data_pipeline.fast.language import detect
from mlm_repro.data_pipeline.passes import measure
from mlm_repro.data_pipeline.runner import SHELF, build_dataset
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.lineage.config import load_config
from mlm_repro.lineage.digest import check_seal, sha256_file
from tests.commands import Command
from tests.data_pipeline.builds import GERMAN, PASSAGE, build, files_of, ledger_of
from tests.data_pipeline.conftest import sentences, write_jsonl, write_recipe
from tests.data_pipeline.test_token_file import read_by_description
from tests.made_data import VOCABULARY

UNIQUE = 60


def corpus() -> list[str]:
    texts = [sentences(20, seed) for seed in range(UNIQUE)]
    texts.append(texts[3].replace("river", "rivers", 1) + " Truly.")
    texts.append(texts[5])
    texts += [GERMAN, "   ", "A short text in English that says little.", "1234567 " * 200]
    texts.append("broken â€œquotesâ€\x9d " + sentences(20, 900))
    texts.append(f"{sentences(20, 901)} {PASSAGE}. {sentences(20, 902)}")
    return texts


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus with one malformed line, built by one worker; its test set is one planted
    passage."""
    directory = tmp_path_factory.mktemp("built")
    (directory / "data" / "lambada").mkdir(parents=True)
    write_jsonl(directory / "data" / "lambada" / "lambada_test.jsonl", [PASSAGE])
    source = write_jsonl(directory / "corpus.jsonl", corpus())
    source.write_text(source.read_text() + "not json")
    write_recipe(directory / "recipe.toml", f"jsonl:{source}")
    build_by(1, directory, "one")
    return directory


def build_by(workers: int, directory: Path, root: str) -> Path:
    config = load_config(
        directory / "recipe.toml", DataConfig, [f"workers={workers}", "sources.max_bad_fraction=1"]
    )
    return build(directory, config, root)


def test_documents_keep_their_numbers_over_batches(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the batches of a shard end, of a megabyte each, changes nothing of the dataset."""
    monkeypatch.setattr(measure, "BATCH_CHARACTERS", 4000)
    assert files_of(build_by(1, built, "batches")) == files_of(built / "one" / "small")


def test_layout_and_seal(built: Path) -> None:
    dataset = (built / "one" / "small").resolve()
    assert sorted(files_of(dataset)) == [
        "dataset.json",
        "documents/train.jsonl",
        "documents/valid.jsonl",
        "duplicates.jsonl",
        "quarantine.jsonl",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "train_text_document.bin",
        "train_text_document.idx",
        "valid_text_document.bin",
        "valid_text_document.idx",
    ]
    check_seal(dataset)
    assert sorted(path.name for path in (built / "one").iterdir()) == [SHELF, "small", dataset.name]
    assert json.loads((dataset / "manifest.json").read_text())["kind"] == "data"


def test_token_files_hold_the_documents(built: Path) -> None:
    dataset = built / "one" / "small"
    described = json.loads((dataset / "dataset.json").read_text())
    tokenizer = Tokenizer.load(dataset / "tokenizer")
    assert described["vocab_size"] == tokenizer.vocab_size == 300
    assert described["padded_vocab_size"] == 384
    assert described["end_of_text"] == tokenizer.end_of_text == 299
    assert described["tokenizer"] == {
        "kind": "train",
        "digest": sha256_file(dataset / "tokenizer/tokenizer.json"),
    }
    for name, split in described["splits"].items():
        documents, starts, _ = read_by_description(dataset / split["prefix"])
        texts = [
            json.loads(line)["text"]
            for line in (dataset / f"documents/{name}.jsonl").open(encoding="utf-8")
        ]
        assert documents == [[*tokenizer.encode(text), 299] for text in texts]
        assert starts == list(range(len(texts) + 1))
        assert split["documents"] == len(texts)
        assert split["tokens"] == sum(map(len, documents))
        assert split["bytes"] == sum(len(text.encode()) for text in texts)


def test_each_stage_drops_what_it_should(built: Path) -> None:
    ledger = ledger_of(built / "one" / "small")
    stages = {stage["name"]: stage for stage in ledger["stages"]}
    assert list(stages) == [
        "source",
        "clean",
        "language",
        "length",
        "deduplicate",
        "decontaminate",
        "split",
        "tokenize",
    ]
    counts = {
        name: {reason: n["documents"] for reason, n in stage["dropped"].items()}
        for name, stage in stages.items()
    }
    assert counts == {
        "source": {},
        "clean": {"empty": 1},
        "language": {"language de": 1, "language not detectable": 1},
        "length": {"fewer than 128 tokens": 1},
        "deduplicate": {"near-duplicate": 2},
        "decontaminate": {},
        "split": {},
        "tokenize": {},
    }
    assert stages["clean"]["changed"] == 1
    assert stages["decontaminate"]["changed"] == 1
    assert stages["decontaminate"]["documents_out"] == stages["decontaminate"]["documents_in"] + 1
    assert stages["language"]["samples"]["language de"] == [
        {"id": "corpus.jsonl:63", "excerpt": GERMAN[:300]}
    ]
    assert "NOT searched for wikitext103" in stages["decontaminate"]["note"]
    assert "searched for lambada: 1 documents matched" in stages["decontaminate"]["note"]
    assert ledger["malformed_lines"] == 1
    quarantined = read_jsonl(built / "one/small/quarantine.jsonl")
    assert [(item["source"], item["line"], item["excerpt"]) for item in quarantined] == [
        ("corpus.jsonl", len(corpus()) + 1, "not json")
    ]


def test_ledger_adds_up(built: Path) -> None:
    dataset = built / "one" / "small"
    ledger = ledger_of(dataset)
    stages = ledger["stages"]
    tokenizer = Tokenizer.load(dataset / "tokenizer")
    assert stages[0]["documents_in"] == len(corpus())
    assert stages[0]["bytes_in"] == sum(len(text.encode()) for text in corpus())
    counted = {
        stage["name"]: stage["tokens_in"] for stage in stages if stage["tokens_out"] is not None
    }
    assert list(counted) == ["length", "deduplicate", "decontaminate", "split", "tokenize"]
    texts = [fix_text("NFC")(text) for text in corpus()]
    assert counted["length"] == sum(
        len(tokenizer.encode(text)) + 1 for text in texts if detect(text) == "en"
    )
    for before, after in pairwise(stages):
        for unit in ("documents", "bytes", "tokens"):
            if before["name"] in counted or unit != "tokens":
                assert after[f"{unit}_in"] == before[f"{unit}_out"]
    for stage in stages:
        for unit in ("documents", "bytes", "tokens")[: 3 if stage["name"] in counted else 2]:
            lost = stage[f"{unit}_in"] - stage[f"{unit}_out"]
            if not stage["changed"]:
                assert lost == sum(amount[unit] for amount in stage["dropped"].values())
    for unit in ("documents", "bytes", "tokens"):
        assert stages[-1][f"{unit}_out"] == sum(split[unit] for split in ledger["splits"].values())


def test_planted_passage_and_duplicates_are_gone(built: Path) -> None:
    dataset = built / "one" / "small"
    documents = [
        json.loads(line)
        for name in ("train", "valid")
        for line in (dataset / f"documents/{name}.jsonl").open()
    ]
    kept = {document["id"] for document in documents}
    assert not any("violet zebras" in document["text"] for document in documents)
    assert "corpus.jsonl:4" in kept
    assert not kept & {f"corpus.jsonl:{UNIQUE + 1}", f"corpus.jsonl:{UNIQUE + 2}"}
    assert {"corpus.jsonl:68#0", "corpus.jsonl:68#1"} <= kept
    assert any(document["text"].startswith('broken "quotes" ') for document in documents)
    assert len([json.loads(line) for line in (dataset / "documents/valid.jsonl").open()]) == round(
        len(documents) / 30
    )


def test_complete_run_is_reused_and_changed_input_is_not(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build_by(1, built, "one") == (built / "one" / "small").resolve()
    assert "already complete" in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.delenv("MLM_DATA_DIR", raising=False)
        config = load_config(
            built / "recipe.toml", DataConfig, ["workers=1", "sources.max_bad_fraction=1"]
        )
        without_test_sets = build_dataset(config, built / "one").path
        reseeded = build_dataset(config.model_copy(update={"seed": 5}), built / "one").path
    assert len({without_test_sets, reseeded, build_by(1, built, "one")}) == 3
    assert "violet zebras" in "".join(
        path.read_text() for path in (without_test_sets / "documents").iterdir()
    )


def test_vocabulary_and_test_sets_of_a_data_directory(
    cli: Command, made_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLM_DATA_DIR", str(made_data))
    lines = (
        (made_data / "wikitext-103" / "wiki.test.tokens").read_text(encoding="utf-8").splitlines()
    )
    passages = [line for line in lines if len(line) > 800][:3]
    planted = [
        f"{sentences(20, n)} {passage} {sentences(20, n + 50)}"
        for n, passage in enumerate(passages)
    ]
    write_jsonl(tmp_path / "corpus.jsonl", [*planted, *(sentences(20, n) for n in range(100, 110))])
    (tmp_path / "r.toml").write_text(
        'name = "g"\nworkers = 1\n[sources]\nnames = ["jsonl:corpus.jsonl"]\n[tokenizer]\ntp = 8\n'
    )
    cli("run", "r.toml", ends=0)
    described = json.loads(Path("runs/g/dataset.json").read_text())
    sizes = (described["vocab_size"], described["padded_vocab_size"], described["end_of_text"])
    assert sizes == (VOCABULARY, 2048, VOCABULARY - 1)
    ledger = ledger_of(Path("runs/g"))
    assert ledger["stages"][5]["changed"] == 3
    kept = "".join(path.read_text(encoding="utf-8") for path in Path("runs/g/documents").iterdir())
    assert not any(passage[200:280] in kept for passage in passages)
