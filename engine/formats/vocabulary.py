"""Tokenizers in Hugging Face's files: tokenizer.json, or vocab.json with merges.txt.

Import and export keep the ids of every text. Our tokenizer recognises no special token in text, which an exported
tokenizer_config.json states as `split_special_tokens`.
"""

import json
from pathlib import Path

from mlm_repro.data_pipeline.tokens.tokenizer import FILE_NAME, Tokenizer
from mlm_repro.lineage.atomic import read_json, write_json, write_text
from mlm_repro.lineage.errors import BadInput, IntegrityFailure

VOCABULARY, MERGES = "vocab.json", "merges.txt"


def write_vocabulary(source: Path, out: Path, seq_length: int) -> None:
    """Write the tokenizer in `source`, a checkpoint's `tokenizer/`, to `out` for Hugging Face's AutoTokenizer."""
    tokenizer = Tokenizer.load(source)
    tokenizer.save(out)
    reader = "PreTrainedTokenizerFast"  # reads tokenizer.json, because words cannot be written as merges
    if tokenizer.is_byte_level:
        reader, model = "GPT2Tokenizer", read_json(out / FILE_NAME)["model"]
        write_text(out / VOCABULARY, json.dumps(model["vocab"], ensure_ascii=False))
        merges = [f"{left} {right}\n" for left, right in model["merges"]]
        write_text(out / MERGES, "".join(["#version: 0.2\n", *merges]))
    settings = {
        "tokenizer_class": reader, "add_prefix_space": False, "model_max_length": seq_length,
        "split_special_tokens": True,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), tokenizer.end_token),
    }  # fmt: skip
    write_json(out / "tokenizer_config.json", settings)


def read_vocabulary(directory: Path) -> tuple[Tokenizer, list[Path]]:
    """The tokenizer of a Hugging Face directory, from tokenizer.json if there is one, and the files with it.

    Raises BadInput if there is none, IntegrityFailure if it is damaged.
    """
    path = directory / FILE_NAME
    if path.is_file():
        return Tokenizer.load(directory), [path]
    if not (directory / VOCABULARY).is_file():
        raise BadInput(
            f"{directory} has neither {FILE_NAME} nor {VOCABULARY} with {MERGES}: give it (--vocab, or --set vocab=)"
        )
    return read_vocabulary_files(directory)


def read_vocabulary_files(directory: Path) -> tuple[Tokenizer, list[Path]]:
    """The tokenizer of a directory's vocab.json and merges.txt, and these files.

    Raises BadInput if one is missing, IntegrityFailure if one is damaged.
    """
    vocabulary, merges = directory / VOCABULARY, directory / MERGES
    for path in (vocabulary, merges):
        if not path.is_file():
            raise BadInput(f"there is no {path.name} in {directory}")
    try:
        return Tokenizer.from_gpt2_files(vocabulary, merges), [vocabulary, merges]
    except BadInput as error:
        raise IntegrityFailure(str(error)) from error


def check_vocabulary(tokenizer: Tokenizer, rows: int, where: object) -> None:
    """Raise IntegrityFailure if the tokenizer has more entries than the word embedding has rows."""
    if tokenizer.vocab_size > rows:
        entries = f"the tokenizer has {tokenizer.vocab_size} entries"
        raise IntegrityFailure(f"{where}: {entries}, the word embedding only {rows} rows")
