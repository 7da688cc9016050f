"""Small corpora with everything in them, datasets built from them, and what must be equal about two
datasets."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.data_pipeline.runner import build_dataset
from mlm_repro.lineage.config import override_config
from mlm_repro.lineage.digest import sha256_file
from tests.data_pipeline.conftest import sentences, write_jsonl

PASSAGE = (
    "seventeen violet zebras quietly admire gentle umbrellas whenever thunder interrupts nine"
    " sleepy accordion players"
)
GERMAN = "Der Hund lief schnell über die Straße, weil das Wetter am Abend schlechter wurde. " * 12


def mixed_texts(count: int) -> list[str]:
    """English with near-duplicates, exact duplicates, mojibake, German, short texts and test-set
    text among it."""
    texts = [sentences(20, seed) for seed in range(count)]
    for number in range(0, count, 10):
        texts[number + 1] = texts[number].replace("river", "rivers", 1) + " Truly."
        texts[number + 2] = texts[(number * 7) % count]
        texts[number + 3] = f"{sentences(15, number)} {PASSAGE}. {sentences(20, number + 1000)}"
        texts[number + 4] = "broken â€œquotesâ€\x9d " + sentences(20, number + 2000)
        texts[number + 5] = (GERMAN, "   ", "A short text.", "1234567 " * 200)[number // 10 % 4]
    return texts


def write_mixed(folder: Path, count: int) -> Path:
    """A file of the texts with malformed lines among them; its test set is beside it."""
    (folder / "data" / "lambada").mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "data" / "lambada" / "lambada_test.jsonl", [PASSAGE])
    lines = [json.dumps({"text": text}).encode() for text in mixed_texts(count)]
    lines[count // 2 : count // 2] = [b"not json", b'{"text": "bad byte \xff"}', b"", b"{}"]
    path = folder / "corpus.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def config_for(source: str, *overrides: str) -> DataConfig:
    """A small dataset of one source by one worker; `overrides` as for `--set`."""
    values = {
        "name": "small",
        "workers": 1,
        "sources": {"names": [source], "max_bad_fraction": 1.0},
        "decontaminate": {"test_sets": ["lambada"], "frequent": 1000},
        "tokenizer": {"kind": "train", "vocab_size": 300},
    }
    return override_config(DataConfig.model_validate(values), overrides)


def build(folder: Path, config: DataConfig, root: str, executor: str = "local") -> Path:
    """The dataset directory, built with the test set that lies in `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLM_DATA_DIR", str(folder / "data"))
        patch.setenv("HOME", str(folder))
        patch.setenv("HF_HUB_OFFLINE", "1")
        return build_dataset(config, folder / root, executor).path


def files_of(directory: Path) -> dict[str, str]:
    """Digest of every file that must not change between equal runs; nothing hidden may be left."""
    return {
        str(path.relative_to(directory)): sha256_file(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in ("COMPLETE", "manifest.json", "ledger.json")
    }


def ledger_of(directory: Path) -> dict[str, Any]:
    """The ledger without its times and the shards it was made in."""
    ledger: dict[str, Any] = json.loads((directory / "ledger.json").read_text(encoding="utf-8"))
    for stage in ledger["stages"]:
        del stage["seconds"]
    del ledger["shards"]
    return ledger


def in_child(work: Any, *arguments: Any) -> int:
    """The wait status of a forked process that calls `work`; an exception makes it exit with 1."""
    process = os.fork()
    if process == 0:
        try:
            work(*arguments)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(process, 0)[1]
