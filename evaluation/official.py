"""Recognising the published test files and the published vocabulary."""

import hashlib
from pathlib import Path

from evaluation.protocol import Encoder
from lineage.atomic import read_bytes
from lineage.errors import BadInput, IntegrityFailure

GPT2_VOCAB_SIZE = 50257
GPT2_SAMPLE = ("Hello world", [15496, 995])


def read_official(path: Path, sha256: str, name: str) -> str:
    """The text of the file at `path`. Raises IntegrityFailure unless its content is the published one."""
    try:
        content = read_bytes(path)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise IntegrityFailure(f"{path} is not {name}: its SHA-256 begins {digest[:12]}, not {sha256[:12]}")
    return content.decode("utf-8")


def has_gpt2_vocabulary(tokenizer: Encoder) -> bool:
    """Whether the tokenizer numbers sub-words as OpenAI's GPT-2 does."""
    text, ids = GPT2_SAMPLE
    return tokenizer.vocab_size == GPT2_VOCAB_SIZE and tokenizer.encode_ids(text).tolist() == ids
