"""Tokenizers in Hugging Face's files: tokenizer.json, or vocab.json with merges.txt.

Import and export keep the ids of every text. Our tokenizer recognises no special token in text,
which an exported tokenizer_config.json states as `split_special_tokens`.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from mlm_repro.data_pipeline.tokens.special_tokens import SPECIAL_TOKENS
from mlm_repro.data_pipeline.tokens.tokenizer import FILE_NAME, Tokenizer
from mlm_repro.lineage.atomic import read_json, write_json, write_text
from mlm_repro.lineage.errors import BadInput, IntegrityFailure

VOCABULARY = "vocab.json"
MERGES = "merges.txt"


def write_vocabulary(
    tokenizer: Tokenizer, out: Path, seq_length: int, is_bert: bool = False
) -> None:
    """Write a tokenizer's files for Hugging Face's AutoTokenizer into the directory `out`, which is
    made if it is missing; files of these names there are replaced. They are tokenizer.json,
    tokenizer_config.json and, for a byte-level tokenizer that is not a BERT's, vocab.json and
    merges.txt. With `is_bert` the files encode pairs of texts with the special tokens. `seq_length`
    is the longest sequence in tokens."""
    tokenizer.save(out)
    if is_bert:
        _write_pairs(tokenizer, out, seq_length)
        return
    # This class reads tokenizer.json: a vocabulary of words cannot be written as merges.
    reader = "PreTrainedTokenizerFast"
    if tokenizer.is_byte_level:
        reader = "GPT2Tokenizer"
        model = read_json(out / FILE_NAME)["model"]
        write_text(out / VOCABULARY, json.dumps(model["vocab"], ensure_ascii=False))
        merges = [f"{left} {right}\n" for left, right in model["merges"]]
        write_text(out / MERGES, "".join(["#version: 0.2\n", *merges]))
    settings = {
        "tokenizer_class": reader,
        "add_prefix_space": False,
        "model_max_length": seq_length,
        "split_special_tokens": True,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), tokenizer.end_token),
    }
    write_json(out / "tokenizer_config.json", settings)


def _write_pairs(tokenizer: Tokenizer, out: Path, seq_length: int) -> None:
    """Rewrite tokenizer.json, the file of `tokenizer` that the caller has saved in the directory
    `out`, with a BERT's special tokens added, so that it encodes a text as [CLS] text [SEP] and a
    pair of texts as [CLS] first [SEP] second [SEP], with the ids in `tokenizer.special_ids`. Write
    tokenizer_config.json beside it, with `seq_length` as the longest sequence in tokens."""
    file = out / FILE_NAME
    backend: Any = Backend.from_file(str(file))
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    ids = list(zip(SPECIAL_TOKENS[:2], tokenizer.special_ids, strict=False))
    backend.post_processor = TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ids
    )
    write_text(file, backend.to_str(pretty=True))
    named = dict(
        zip(("cls_token", "sep_token", "mask_token", "pad_token"), SPECIAL_TOKENS, strict=True)
    )
    unknown = {"unk_token": "[UNK]"} if backend.token_to_id("[UNK]") is not None else {}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    reader = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_length,
        "model_input_names": inputs,
    }
    write_json(out / "tokenizer_config.json", reader | named | unknown)


def read_vocabulary(directory: Path) -> tuple[Tokenizer, list[Path]]:
    """Return a pair: the Tokenizer of a Hugging Face directory, and the list of the paths that were
    read, tokenizer.json if it exists, else vocab.json and merges.txt.

    Raises BadInput if the directory lacks these files or tokenizer.json lacks the token that ends a
    text, IntegrityFailure if a file is damaged or refused, or if vocab.json lacks `<|endoftext|>`.
    """
    path = directory / FILE_NAME
    if path.is_file():
        return Tokenizer.load(directory), [path]
    if not (directory / VOCABULARY).is_file():
        raise BadInput(
            f"{directory} has no tokenizer, neither {FILE_NAME} nor {VOCABULARY} with {MERGES}:"
            " name a directory that has the last two (--vocab, or --set vocab=)"
        )
    return read_vocabulary_files(directory)


def read_vocabulary_files(directory: Path) -> tuple[Tokenizer, list[Path]]:
    """Return a pair: the Tokenizer that a directory's vocab.json and merges.txt make, and the list
    of the two files' paths, in this order.

    Raises BadInput if a file is missing, IntegrityFailure if a file is damaged or the vocabulary
    lacks `<|endoftext|>`.
    """
    vocabulary = directory / VOCABULARY
    merges = directory / MERGES
    for path in (vocabulary, merges):
        if not path.is_file():
            raise BadInput(
                f"{directory} has no {path.name}, and a vocabulary needs {VOCABULARY} and {MERGES}"
            )
    try:
        return Tokenizer.from_gpt2_files(vocabulary, merges), [vocabulary, merges]
    except BadInput as error:
        raise IntegrityFailure(str(error)) from error


def check_vocabulary(tokenizer: Tokenizer, rows: int, where: object) -> None:
    """Raise IntegrityFailure if the tokenizer has more entries than `rows`, the number of rows of
    the word embedding; fewer are allowed. `where` begins the message."""
    if tokenizer.vocab_size > rows:
        raise IntegrityFailure(
            f"{where}: the tokenizer has {tokenizer.vocab_size} entries, more than the {rows} rows"
            " of the word embedding: take the tokenizer and the weights of one model"
        )
