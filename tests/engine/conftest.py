"""A tiny sealed dataset, and one uninterrupted run on it that others are held against."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mlm_repro.data_pipeline.tokens.token_file import TokenFileWriter, token_dtype
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer, padded_vocab_size
from mlm_repro.lineage.digest import seal

WORDS = (
    "the",
    "a",
    "river",
    "house",
    "stone",
    "walks",
    "sleeps",
    "under",
    "over",
    "bright",
    "old",
    "wind",
    "and",
    "then",
    "slowly",
    "child",
    "reads",
    "sings",
)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    try:
        import torch
    except ImportError:
        return  # some tests need none
    torch.set_num_threads(1)


def write_dataset(directory: Path, seed: int = 0) -> Path:
    """A dataset of random sentences in the pipeline's layout."""
    random = np.random.RandomState(seed)
    texts = [" ".join(random.choice(WORDS, random.randint(20, 60))) + "." for _ in range(200)]
    tokenizer = Tokenizer.train(texts, 290)
    tokenizer.save(directory / "tokenizer")
    for split, part in (("train", texts[:150]), ("valid", texts[150:])):
        with TokenFileWriter(
            directory / f"{split}_text_document", token_dtype(tokenizer.vocab_size)
        ) as writer:
            for text in part:
                writer.add_document([*tokenizer.encode(text), tokenizer.end_of_text])
    sizes = {
        "vocab_size": tokenizer.vocab_size,
        "padded_vocab_size": padded_vocab_size(tokenizer.vocab_size),
    }
    made_by = {
        "name": "words",
        "seed": seed,
        "tokenizer": {"kind": "train", "digest": tokenizer.digest},
    }
    (directory / "dataset.json").write_text(json.dumps(made_by | sizes), encoding="utf-8")
    seal(directory)
    return directory


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("dataset"))


@pytest.fixture(scope="session")
def uninterrupted(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the small recipe's run, trained in this process from beginning to end."""
    from tests.engine.small_run import small_config, train

    return train(small_config(dataset), tmp_path_factory.mktemp("uninterrupted")).path


@pytest.fixture
def copied(uninterrupted: Path, tmp_path: Path) -> Path:
    """A copy of the small recipe's run, which a test may change."""
    return Path(shutil.copytree(uninterrupted, tmp_path / uninterrupted.name))


@pytest.fixture(scope="session")
def uninterrupted_long(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with `LONG`, which leaves time to stop it half way."""
    from tests.engine.small_run import LONG, small_config, train

    return train(small_config(dataset, **LONG), tmp_path_factory.mktemp("long")).path


@pytest.fixture(scope="session")
def rough(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the `checkpoint` of `rough_model` and what was `exported` from it for Hugging
    Face."""
    from mlm_repro.engine.formats.convert import export_checkpoint
    from tests.engine.test_formats_checkpoint import write_rough

    folder = tmp_path_factory.mktemp("rough")
    write_rough(folder / "checkpoint")
    export_checkpoint(folder / "checkpoint", folder / "exported")
    return folder


@pytest.fixture
def exported(rough: Path, tmp_path: Path) -> Path:
    """A copy of the export, which a test may change, beside one of its checkpoint."""
    return Path(shutil.copytree(rough, tmp_path, dirs_exist_ok=True)) / "exported"


@pytest.fixture(scope="session")
def vocab(rough: Path) -> Path:
    """A folder with vocab.json and merges.txt."""
    return rough / "exported"
