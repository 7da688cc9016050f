"""Tasks that make the tokenizer of a dataset: train it on the text, or copy the published one."""

import zlib
from collections.abc import Iterator
from pathlib import Path

from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.data_pipeline.work.document_shard import DocumentShard
from mlm_repro.data_pipeline.work.tasks import Counts, Settings

TRAINING_BYTES = 2 << 30
"""Approximate size, in bytes, to which a larger corpus is sampled down. It bounds the memory of
training."""


def train(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Task: write `tokenizer.json` and `tokenizer_config.json` of a tokenizer of `vocab_size`
    tokens: of words if `kind` is `words`, else byte-level BPE. It is trained on documents that the
    first pass kept, in the shards from the first to before the second of the two numbers in
    `shards`; the texts have `bytes` bytes in all, and of more than TRAINING_BYTES a sample is
    taken. Inputs: the folder of the first pass. Returns no counts. Raises BadInput if the text is
    too small for that many tokens."""
    make = Tokenizer.of_words if settings["kind"] == "words" else Tokenizer.train
    make(
        _sample(inputs[0], range(*settings["shards"]), settings["bytes"]), settings["vocab_size"]
    ).save(directory)
    return {}


def copy(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Task: write `tokenizer.json` and `tokenizer_config.json` of the tokenizer at `path`, with
    `end_of_text` as the token that ends a text if that is not None; if `path` is None, of GPT-2's,
    from its two `files`, vocab.json and merges.txt in this order. Returns no counts. Raises
    BadInput or IntegrityFailure if the files cannot be used."""
    tokenizer = (
        Tokenizer.open(Path(settings["path"]), settings["end_of_text"])
        if settings["path"]
        else Tokenizer.from_gpt2_files(*map(Path, settings["files"]))
    )
    tokenizer.save(directory)
    return {}


def _sample(prepared: Path, shards: range, size: int) -> Iterator[str]:
    """Yield the texts of the documents in the shards with the numbers `shards`, in order;
    `prepared` is the folder of the first pass. If `size`, their bytes in all, exceeds
    TRAINING_BYTES, only texts with a low checksum are taken, about TRAINING_BYTES bytes in all, so
    that sharding changes nothing."""
    below = (TRAINING_BYTES << 32) // max(size, 1)
    for shard in shards:
        for document in DocumentShard(prepared / f"{shard:05d}"):
            if below >= 1 << 32 or zlib.crc32(document.text.encode("utf-8")) < below:
                yield document.text
