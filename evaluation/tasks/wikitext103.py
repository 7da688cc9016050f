"""WikiText's test files by every convention. `wikitext103` alone is Megatron-LM's recipe.

The constants are counts of the GPT-2 vocabulary on the official file. The window is the model's
context, at most 1024 tokens. Strides are named for a window of 1024; in a shorter window they are
shortened in proportion.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from mlm_repro.data_pipeline.contamination.testsets import TEST_SETS
from mlm_repro.evaluation.protocol import Encoder, SourceText
from mlm_repro.evaluation.tasks.detokenize import NAME, detokenize_wikitext
from mlm_repro.evaluation.tasks.documents import (
    RunningText,
    join_rows,
    lm_eval_documents,
    read_official,
)
from mlm_repro.evaluation.tasks.perplexity import (
    UNCHANGED,
    Detokenizer,
    Divisor,
    PerplexityTask,
    Stream,
    sliding_stream,
)
from mlm_repro.evaluation.tasks.programs import GPTQ, document_stream, program_perplexity
from mlm_repro.evaluation.windows import megatron_windows
from mlm_repro.lineage.errors import IntegrityFailure

FILES = {
    "wikitext103": "WikiText-103 test",
    "wikitext103-valid": "WikiText-103 validation",
    "wikitext2": "WikiText-2 raw test",
}
TEST_FILE_SHA256 = TEST_SETS["wikitext103"].sha256
NUM_ORIGINAL_TOKENS = 245_566
NUM_LM_EVAL_WORDS = 241_335
MEGATRON = Detokenizer(NAME, detokenize_wikitext)
ROWS = Detokenizer("rows-by-blank-lines", join_rows)
NUM_GPT2_TOKENS = {MEGATRON: 270_330, UNCHANGED: 285_234, ROWS: 286_657}
NUM_GPT2_TOKENS_BY_DOCUMENT = 270_263
NUM_GPT2_TOKENS_OF_WIKITEXT2 = 287_644
"""Number of GPT-2's sub-words in WikiText-2's rows joined by blank lines, as transformers' page on
perplexity shows them."""
GPT2_VOCAB_SIZE = 50_257


def read_wikitext(name: str, path: Path, test_set: str = "wikitext103") -> RunningText:
    """Read the official file of the test set `test_set`, a key of FILES, at `path`, and return it
    as a RunningText with its articles. `name` is the protocol's, which the text's source states.

    Raises BadInput if the file cannot be read, and IntegrityFailure if it is not that test set's
    official one, or if the counts of WikiText-103's test file are not the published ones.
    """
    file = TEST_SETS[test_set]
    title = f"{FILES[test_set]} file"
    content = read_official(path, file.sha256, f"the {title} {Path(file.place).name}")
    text = RunningText.of_wikitext(SourceText(name, title, file.sha256), content)
    if test_set == "wikitext103":
        _expect(text.num_original_tokens, NUM_ORIGINAL_TOKENS, "original tokens")
        _expect(
            text.num_lm_eval_words, NUM_LM_EVAL_WORDS, "words as lm-evaluation-harness counts them"
        )
    return text


def sliding_wikitext103(
    name: str,
    path: Path,
    tokenizer: Encoder,
    context: int,
    detokenizer: Detokenizer = MEGATRON,
    stride: int = 32,
) -> PerplexityTask:
    """Return the PerplexityTask on the whole WikiText-103 test file at `path`, rewritten by
    `detokenizer`, in sliding windows of `context` inputs, or of 1024 if that is less. `stride` is
    the number of new tokens in a window of 1024; a shorter window has fewer in proportion.
    `detokenizer` is a key of NUM_GPT2_TOKENS, and `name` is the task's. Raises BadInput if the file
    cannot be read or the stride is then longer than the window, IntegrityFailure if it is another
    file or gives GPT-2 another number of sub-words."""
    return _in_windows(name, path, tokenizer, detokenizer, *megatron_windows(context, stride))


raw_wikitext103 = partial(sliding_wikitext103, detokenizer=UNCHANGED)


def memory_wikitext103(name: str, path: Path, tokenizer: Encoder, context: int) -> PerplexityTask:
    """Return the PerplexityTask on the unchanged WikiText-103 test file at `path` in disjoint
    windows of the model's segment length `context`, each with the Transformer-XL's memory of
    earlier ones. `name` is the task's. Raises BadInput if the file cannot be read, IntegrityFailure
    if it is another file or gives GPT-2 another number of sub-words."""
    return _in_windows(name, path, tokenizer, UNCHANGED, context, context, with_memory=True)


def huggingface_wikitext(
    name: str, path: Path, tokenizer: Encoder, context: int, test_set: str = "wikitext103"
) -> PerplexityTask:
    """Return the PerplexityTask on the official WikiText file of `test_set`, `wikitext103` or
    `wikitext2`, at `path` by transformers' strided recipe (`docs/source/en/perplexity.md`), whose
    loss is the mean of the windows' mean losses, each weighted by the window's number of scored
    sub-words, one too few in each window but the first.

    Its windows have `context` tokens, the target included, so the first target has one token less
    before it than in Megatron-LM's. A stride is half of `context`, but on WikiText-2, the page's
    own text, the page's 512 at most. Raises BadInput if the file cannot be read, IntegrityFailure
    if it is another file or gives GPT-2 another number of sub-words.
    """
    longest = 512 if test_set == "wikitext2" else context
    stride = min(longest, context // 2)
    return _in_windows(
        name, path, tokenizer, ROWS, context - 1, stride, "transformers labels", test_set=test_set
    )


def gptq_wikitext2(name: str, path: Path, tokenizer: Encoder, context: int) -> PerplexityTask:
    """Return the PerplexityTask on the WikiText-2 file at `path` by GPTQ's recipe, in whole
    disjoint windows of `context` tokens: the rows are joined as in GPTQ's `datautils.py`, the
    windows scored as in its `llama.py`. `name` is the task's. Raises BadInput if the file cannot be
    read or is shorter than a window, and IntegrityFailure if the file is not the official one or if
    GPT-2's tokenizer gives another number of sub-words than the known one."""
    text = read_wikitext(name, path, "wikitext2")
    task = program_perplexity(text, GPTQ, [join_rows(text.text)], tokenizer, context)
    _expect_gpt2(tokenizer, task.stream, NUM_GPT2_TOKENS_OF_WIKITEXT2)
    task.stream = replace(task.stream, recipe=f"detokenizer {ROWS.name}; {task.stream.recipe}")
    return task


def lm_eval_wikitext(
    name: str,
    path: Path,
    tokenizer: Encoder,
    context: int,
    is_double: bool = False,
    test_set: str = "wikitext103",
) -> PerplexityTask:
    """Return the PerplexityTask on the official WikiText file of `test_set`, `wikitext103` or
    `wikitext2`, at `path`, which scores document by document as lm-evaluation-harness's `wikitext`
    does, in windows of at most `context` inputs that score disjoint sub-words, and divides the loss
    by the number of words as that program counts them. `name` is the protocol's, which the result
    states as its source. With `is_double` a tokenizer's first tokens are scored too, after the
    token that begins a document, as releases up to 0.4.13 do.

    Raises BadInput if the file cannot be read, and IntegrityFailure if it is not the official one
    or if GPT-2's tokenizer gives another number of WikiText-103's sub-words than the known one.
    """
    text = read_wikitext(name, path, test_set)
    documents = list(lm_eval_documents(text.text))
    rewritten = list(map(detokenize_wikitext, documents))
    stream = document_stream(documents, rewritten, tokenizer, context, is_double, NAME)
    if test_set == "wikitext103":
        _expect_gpt2(tokenizer, stream, NUM_GPT2_TOKENS_BY_DOCUMENT)
    return PerplexityTask(text, stream, tokenizer, "lm-eval words")


def _in_windows(
    name: str,
    path: Path,
    tokenizer: Encoder,
    detokenizer: Detokenizer,
    window: int,
    stride: int,
    divisor: Divisor = "original tokens",
    with_memory: bool = False,
    test_set: str = "wikitext103",
) -> PerplexityTask:
    """Return the PerplexityTask `name` on the official WikiText file of `test_set`, `wikitext103`
    or `wikitext2`, at `path`, rewritten by `detokenizer`, in sliding windows of `window` inputs
    that begin `stride` tokens apart. `divisor` names the loss's divisor; `with_memory` scores each
    window with a Transformer-XL's memory of earlier windows, which needs `stride` equal to
    `window`.

    Raises BadInput if the file cannot be read or `stride` is not from 1 to `window`, and
    IntegrityFailure if the file is not the official one or if GPT-2's tokenizer gives another
    number of sub-words than the known one.
    """
    text = read_wikitext(name, path, test_set)
    stream = sliding_stream(text, detokenizer, tokenizer, window, stride)
    counted = (
        NUM_GPT2_TOKENS_OF_WIKITEXT2 if test_set == "wikitext2" else NUM_GPT2_TOKENS[detokenizer]
    )
    _expect_gpt2(tokenizer, stream, counted)
    return PerplexityTask(text, stream, tokenizer, divisor, with_memory)


def has_gpt2_vocabulary(tokenizer: Encoder) -> bool:
    """Return True if the tokenizer looks like OpenAI's GPT-2: it has 50,257 ids, and encodes `Hello
    world` as GPT-2 does."""
    return tokenizer.vocab_size == GPT2_VOCAB_SIZE and tokenizer.encode("Hello world") == [
        15496,
        995,
    ]


def _expect_gpt2(tokenizer: Encoder, stream: Stream, published: int) -> None:
    """Raise IntegrityFailure if the tokenizer is GPT-2's and the stream's number of sub-words is
    not the published one. Any other tokenizer is accepted."""
    if has_gpt2_vocabulary(tokenizer):
        _expect(stream.num_tokens, published, "GPT-2 tokens")


def _expect(count: int, published: int, what: str) -> None:
    """Raise IntegrityFailure if `count`, of a WikiText file, is not the `published` one; `what`
    names in the message what is counted."""
    if count != published:
        raise IntegrityFailure(
            f"WikiText gives {count} {what} here, not the published {published}: the tokenizer or"
            " this program was changed, so put back GPT-2's own vocabulary, or install this program"
            " anew"
        )
