"""A user's text scored by the recipes of other programs, each under the program's name.

Sources: GPTQ's `llama.py` (`llama_eval`, copied by most papers on quantisation), llama.cpp's
`tools/perplexity/perplexity.cpp`, nanochat's `loss_eval.py`, and lm-evaluation-harness's
`loglikelihood_rolling`.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain

import numpy as np

from mlm_repro.evaluation.protocol import Encoder, Request, shown_first, with_first
from mlm_repro.evaluation.schema import Block
from mlm_repro.evaluation.tasks.documents import RunningText, count_original_tokens
from mlm_repro.evaluation.tasks.perplexity import PerplexityTask, Stream, stretches
from mlm_repro.evaluation.windows import Window, sliding_windows, whole_windows
from mlm_repro.lineage.errors import BadInput

GPTQ = "perplexity-gptq"
LLAMA_CPP = "perplexity-llama.cpp"
NANOCHAT = "perplexity-nanochat"
LM_EVAL = "perplexity-lm-eval"
LM_EVAL_TWICE = "perplexity-lm-eval-bos-twice"
PROGRAMS = {GPTQ: 2048, LLAMA_CPP: 512, NANOCHAT: 2048, LM_EVAL: None, LM_EVAL_TWICE: None}
"""Name of a program's recipe → longest window, in tokens, unless another is requested; None for the
model's context."""


def program_perplexity(
    text: RunningText, program: str, documents: Sequence[str], tokenizer: Encoder, window: int
) -> PerplexityTask:
    """Return the PerplexityTask of scoring documents, as texts, by the recipe of `program`, one of
    `PROGRAMS`, in windows of `window` tokens; for nanochat and lm-evaluation-harness these are
    inputs, and the last target comes after them. `text` is the RunningText that the documents are
    from. GPTQ and llama.cpp score them joined by blank lines, nanochat in one sequence, each after
    a first token, and lm-evaluation-harness each by itself. The words of `text` divide the loss in
    lm-evaluation-harness's recipes, scored sub-words in the others. Bytes are counted in `text`,
    for nanochat in the documents joined by nothing.

    Raises BadInput for a text that is shorter than a window of GPTQ or llama.cpp, or in which
    nanochat has nothing to score.
    """
    if program in (LM_EVAL, LM_EVAL_TWICE):
        stream = document_stream(documents, documents, tokenizer, window, program == LM_EVAL_TWICE)
        return PerplexityTask(text, stream, tokenizer, "lm-eval words")
    if program == NANOCHAT:
        begun = tokenizer.first_tokens[:1] or (tokenizer.document_start,)
        encoded = [[*begun, *ids] for ids in tokenizer.encode_batch(list(documents))]
        text = replace(text, text="".join(documents), articles=[])
    else:
        encoded = [with_first(tokenizer, tokenizer.encode("\n\n".join(documents)))]
    tokens = np.array(list(chain.from_iterable(encoded)), np.int64)
    ends = [*accumulate(map(len, encoded))]
    windows, recipe = _windows(program, ends, window, tokenizer)
    if not windows:
        raise BadInput(
            f"{text.source.title} has {len(tokens):,} sub-words, fewer than a window of {window:,}"
            " or none that this protocol scores: give a longer text or a shorter --window"
        )
    is_target = np.ones(len(tokens), bool)
    is_target[[0, *ends[:-1]]] = False
    numbers = np.cumsum(is_target) - 1
    first = tokenizer.first_tokens[:1] if program == LLAMA_CPP else ()

    def request(shown: Window) -> Request:
        seen = tokens[shown.start : shown.stop].copy()
        seen[: len(first)] = first
        return Request(seen, shown.num_scored)

    blocks = stretches(int(is_target.sum()), text.num_original_tokens, window)
    firsts = [int(numbers[shown.first_scored]) for shown in windows]
    stream = Stream(recipe, len(tokens), [*map(request, windows)], firsts, blocks, window, window)
    return PerplexityTask(text, stream, tokenizer, "sub-words")


def _windows(
    program: str, ends: Sequence[int], c: int, tokenizer: Encoder
) -> tuple[list[Window], str]:
    """Return a pair: a list of the Windows by the recipe of `program`, GPTQ, llama.cpp or nanochat,
    and a phrase on them for the protocol line; `tokenizer` serves for the phrase alone. `ends` has
    the number of tokens up to the end of each document. Windows are disjoint and of `c` tokens; for
    nanochat these are inputs, fewer in the last window, and a target comes after them. GPTQ scores
    all tokens of a window but the first, llama.cpp all but the first c // 2 + 1; both leave out
    what follows the last whole window, which can be the whole text. A window of nanochat in which
    documents begin becomes several with one start, so that no document's first token is scored.
    Raises BadInput if nanochat's recipe gets fewer than two tokens."""
    count = ends[-1]
    before = shown_first(tokenizer)
    if program == GPTQ:
        sentence = (
            f"whole disjoint windows of {c}, the first sub-word of each not scored; {before} before"
            " the text (GPTQ)"
        )
        return whole_windows(count, c), sentence
    if program == LLAMA_CPP:
        sentence = (
            f"whole disjoint windows of {c}, the second half of each scored; {before} in place of"
            " its first sub-word"
        )
        return whole_windows(count, c, c // 2 + 1), f"{sentence} (llama.cpp)"
    cut = []  # a document's first token is no target
    for window in sliding_windows(count, c, c):
        bounds = [
            window.first_scored,
            *(end for end in ends[:-1] if window.first_scored <= end < window.stop),
            window.stop,
        ]
        starts = [bounds[0], *(end + 1 for end in bounds[1:-1])]
        cut += [
            Window(window.start, start, stop)
            for start, stop in zip(starts, bounds[1:], strict=True)
            if stop > start
        ]
    return (
        cut,
        (
            f"documents after their first token, which is not scored, in disjoint windows of {c}"
            " (nanochat)"
        ),
    )


def document_stream(
    documents: Sequence[str],
    rewritten: Sequence[str],
    tokenizer: Encoder,
    seq_length: int,
    is_double: bool = False,
    detokenizer: str = "none",
) -> Stream:
    """Return documents, given as texts, as a Stream in which they are cut as lm-evaluation-harness
    rolls over them: one by one, each after the tokenizer's `document_start`, in windows of at most
    `seq_length` inputs that score disjoint targets; the last of several windows is extended to the
    left to full length. `rewritten`, the documents after a detokenizer, are scored; words and
    titles are from `documents`. `detokenizer` is the detokenizer's name, for the protocol line.

    Up to release 0.4.13 lm-evaluation-harness encodes a document with the tokenizer's first tokens
    and puts the start of a document before these: `is_double` scores the first tokens as it does.
    """
    start = tokenizer.document_start
    encoded = tokenizer.encode_batch(list(rewritten))
    encoded = [with_first(tokenizer, ids) for ids in encoded] if is_double else encoded
    requests = list(chain.from_iterable(Request.rolling(ids, start, seq_length) for ids in encoded))
    first = "end-of-text" if start == tokenizer.end_of_text else repr(tokenizer.decode([start]))
    twice = (
        f" and {shown_first(tokenizer)} scored after it, as in lm-evaluation-harness 0.4.13"
        if is_double
        else ""
    )
    sizes = zip(documents, encoded, strict=True)
    return Stream(
        recipe=(
            f"{len(documents)} documents, detokenizer {detokenizer} on each, {first} first{twice};"
            f" disjoint windows of {seq_length}, the last extended to the left"
        ),
        num_tokens=sum(map(len, encoded)),
        requests=requests,
        first_targets=[0, *accumulate(request.num_scored for request in requests[:-1])],
        blocks=[
            Block(
                title=document.partition("\n")[0].strip(" ="),
                num_targets=len(tokens),
                num_original_tokens=count_original_tokens(document),
            )
            for document, tokens in sizes
        ],
        window=seq_length,
        stride=seq_length,
    )
