"""`lambada`: Megatron's `--strict-lambada` accuracy on OpenAI's LAMBADA file, and nothing else.

This file keeps case, punctuation and newlines. Megatron's instructions call it "processed", its paper
"unprocessed"; the lower-cased, tokenised LAMBADA of the original authors is another test with other numbers.
"""

import json
from pathlib import Path

from data_pipeline.testsets import TEST_SETS
from evaluation.cloze import StrictCloze
from evaluation.official import read_official
from evaluation.protocol import Encoder, SourceText
from lineage.errors import IntegrityFailure

TEST_FILE_SHA256 = TEST_SETS["lambada"].sha256
NUM_EXAMPLES = 5153


def read_passages(path: Path) -> list[str]:
    """The 5153 passages. Raises IntegrityFailure if the file at `path` is another."""
    text = read_official(path, TEST_FILE_SHA256, "OpenAI's LAMBADA test file lambada_test.jsonl")
    passages = [str(json.loads(line)["text"]) for line in text.split("\n") if line]
    if len(passages) != NUM_EXAMPLES:
        raise IntegrityFailure(f"LAMBADA gives {len(passages)} examples here, not the published {NUM_EXAMPLES}")
    return passages


def lambada(path: Path, tokenizer: Encoder, seq_length: int, limit: int | None = None) -> StrictCloze:
    """The task on the official test file at `path`."""
    source = SourceText("lambada", "LAMBADA test file (OpenAI)", TEST_FILE_SHA256)
    return StrictCloze(source, read_passages(path), tokenizer, seq_length, limit)
