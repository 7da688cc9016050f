"""GPT-2's tokenizer in Hugging Face's files: tokenizer.json, or vocab.json with merges.txt.

Import and export keep the ids of every text. Our tokenizer recognises no special token in text, which an exported
tokenizer_config.json states as `split_special_tokens`.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from data_pipeline.tokens.tokenizer import END_OF_TEXT, FILE_NAME, Tokenizer
from lineage.atomic import read_json, write_json, write_text
from lineage.errors import BadInput, IntegrityFailure

VOCABULARY, MERGES = "vocab.json", "merges.txt"
CHANGED_BY = {
    "dropout": (None, 0.0),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "byte_fallback": (None, False),
    "ignore_merges": (None, False),
}
"""Settings of tokenizer.json's BPE model that could change ids → the values that do not."""


def write_vocabulary(source: Path, out: Path, seq_length: int) -> None:
    """Write the tokenizer in `source`, a checkpoint's `tokenizer/`, to `out` for Hugging Face's AutoTokenizer."""
    tokenizer = Tokenizer.load(source)
    tokenizer.save(out)
    reader = "PreTrainedTokenizerFast"  # reads tokenizer.json, because words cannot be written as merges
    if not tokenizer.is_of_words:
        reader, model = "GPT2Tokenizer", read_json(out / FILE_NAME)["model"]
        write_text(out / VOCABULARY, json.dumps(model["vocab"], ensure_ascii=False))
        merges = [f"{left} {right}\n" for left, right in model["merges"]]
        write_text(out / MERGES, "".join(["#version: 0.2\n", *merges]))
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": reader,
            "add_prefix_space": False,
            "model_max_length": seq_length,
            "split_special_tokens": True,
            **special,
        },
    )


def read_vocabulary(directory: Path) -> tuple[Tokenizer, list[Path]]:
    """The tokenizer of a Hugging Face directory, from tokenizer.json if there is one, and the files with it.

    Raises BadInput if there is none or it is of another kind than GPT-2's, IntegrityFailure if it is damaged.
    """
    path = directory / FILE_NAME
    if path.is_file():
        vocabulary, merges = _read_tokenizer_json(path)
        return _build(vocabulary, merges, path), [path]
    if not (directory / VOCABULARY).is_file():
        raise BadInput(f"{directory} has neither {FILE_NAME} nor {VOCABULARY} with {MERGES}: give --vocab")
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
        tokenizer = Tokenizer.from_gpt2_files(vocabulary, merges)
        _check_ids(read_json(vocabulary), vocabulary)
    except BadInput as error:
        raise IntegrityFailure(str(error)) from error
    return tokenizer, [vocabulary, merges]


def _read_tokenizer_json(path: Path) -> tuple[dict[str, int], list[str]]:
    """Token ids, with those of added tokens, and merges."""
    try:
        content = read_json(path)
        model, before = content["model"], content.get("pre_tokenizer") or {}
        _require_gpt2(content, model, before, path)
        vocabulary = {str(token): int(number) for token, number in model["vocab"].items()}
        vocabulary |= {str(added["content"]): int(added["id"]) for added in content.get("added_tokens") or []}
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityFailure(f"{path} is not a readable tokenizer: {type(error).__name__} {error}") from error
    return vocabulary, merges


def _require_gpt2(content: dict[str, Any], model: dict[str, Any], before: dict[str, Any], path: Path) -> None:
    reasons = [
        f"its model is {model.get('type', 'BPE')}" if model.get("type", "BPE") != "BPE" else "",
        "it normalises text" if content.get("normalizer") else "",
        f"its pre-tokenizer is {before.get('type')}" if before.get("type") != "ByteLevel" else "",
        "it adds a space before text" if before.get("add_prefix_space", True) else "",
        "it does not split words" if not before.get("use_regex", True) else "",
        *[f"{key} is {model[key]!r}" for key, same in CHANGED_BY.items() if model.get(key) not in same],
    ]
    if reason := next((reason for reason in reasons if reason), None):
        raise BadInput(f"{path} is not GPT-2's byte-level BPE: {reason}")


def _build(vocabulary: dict[str, int], merges: list[str], path: Path) -> Tokenizer:
    _check_ids(vocabulary, path)
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name) / VOCABULARY, Path(name) / MERGES]
        files[0].write_text(json.dumps(vocabulary), encoding="utf-8")
        files[1].write_text("\n".join(["#version: 0.2", *merges]), encoding="utf-8")
        try:
            return Tokenizer.from_gpt2_files(*files)
        except BadInput as error:
            cause = error.__cause__ or error
            raise IntegrityFailure(f"{path} is not a byte-level BPE vocabulary: {cause}") from error


def _check_ids(vocabulary: dict[str, int], path: Path) -> None:
    """Raise IntegrityFailure unless the ids are 0 to the number of tokens − 1, each once."""
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise IntegrityFailure(f"{path}: its token ids are not 0 to {len(vocabulary) - 1}, each once")
