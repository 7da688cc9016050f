"""`wikitext103`: word-level perplexity on the WikiText-103 test file by Megatron's recipe, and nothing else.

The recipe's constants are those of the GPT-2 vocabulary on the official file. The window is the model's
context, at most 1024 tokens, and the stride a thirty-second of it, which at 1024 is the published 32.
"""

from pathlib import Path

from data_pipeline.testsets import TEST_SETS
from evaluation.detokenize import NAME, detokenize_wikitext
from evaluation.official import has_gpt2_vocabulary, read_official
from evaluation.perplexity import Detokenizer, SlidingPerplexity, count_original_tokens
from evaluation.protocol import Encoder, SourceText
from lineage.errors import IntegrityFailure

TEST_FILE_SHA256 = TEST_SETS["wikitext103"].sha256
NUM_ORIGINAL_TOKENS = 245_566
NUM_GPT2_TOKENS = 270_330
LONGEST_WINDOW = 1024


def wikitext103(path: Path, tokenizer: Encoder, seq_length: int, limit: int | None = None) -> SlidingPerplexity:
    """The task on the official test file at `path`.

    Raises IntegrityFailure if the file is another, or if its counts are not the published ones.
    """
    text = read_official(path, TEST_FILE_SHA256, "the WikiText-103 test file wiki.test.tokens")
    _expect(count_original_tokens(text), NUM_ORIGINAL_TOKENS, "original tokens")
    source = SourceText("wikitext103", "WikiText-103 test file", TEST_FILE_SHA256)
    detokenizer = Detokenizer(NAME, detokenize_wikitext)
    task = SlidingPerplexity(source, text, detokenizer, tokenizer, min(LONGEST_WINDOW, seq_length), limit)
    if has_gpt2_vocabulary(tokenizer):
        _expect(len(task.tokens), NUM_GPT2_TOKENS, "GPT-2 tokens")
    return task


def _expect(found: int, published: int, what: str) -> None:
    if found != published:
        raise IntegrityFailure(f"WikiText-103 gives {found} {what} here, not the published {published}")
