"""lm-evaluation-harness's rules (version 0.4); on the same files Megatron-LM's give other numbers.

Sources: `lm_eval/tasks/wikitext`, `lm_eval/tasks/lambada`, `lm_eval/utils.py get_rolling_token_windows`,
`lm_eval/api/model.py _encode_pair`.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from evaluation.detokenize import NAME, detokenize_wikitext
from evaluation.documents import RunningText, count_original_tokens, lm_eval_documents
from evaluation.perplexity import Stream
from evaluation.protocol import Encoder, Request, Tokens
from evaluation.schema import Block
from evaluation.windows import Window


def rolling_windows(num_tokens: int, seq_length: int) -> Iterator[Window]:
    """Disjoint windows over a document that score every token but the first. Each sees the token before what it scores;
    the last one is extended to the left to a full context."""
    for first in range(1, num_tokens, seq_length):
        stop = min(first + seq_length, num_tokens)
        yield Window(0 if first == 1 else stop - seq_length - 1, first, stop)


def rolling_requests(document: Sequence[int], first: int, seq_length: int) -> list[Request]:
    """A document's sub-words, each scored once, after one token that is put before it."""
    tokens: Tokens = np.asarray([first, *document], dtype=np.int64)
    return [Request.of_window(tokens, w) for w in rolling_windows(len(tokens), seq_length)]


def document_stream(text: RunningText, tokenizer: Encoder, seq_length: int) -> Stream:
    """A WikiText file document by document, each detokenized by itself, in rolling windows."""
    documents = list(lm_eval_documents(text.text))
    encoded = tokenizer.encode_batch([detokenize_wikitext(document) for document in documents])
    requests = [r for tokens in encoded for r in rolling_requests(tokens, tokenizer.document_start, seq_length)]
    start = tokenizer.document_start
    first = "end-of-text" if start == tokenizer.end_of_text else repr(tokenizer.decode([start]))
    return Stream(
        recipe=f"{len(documents)} documents, detokenizer {NAME} on each, {first} first; disjoint windows of "
        f"{seq_length}, the last extended to the left",
        num_tokens=sum(map(len, encoded)),
        requests=requests,
        first_targets=[0, *accumulate(request.num_scored for request in requests[:-1])],
        blocks=[
            Block(
                title=document.partition("\n")[0].strip(" ="),
                num_targets=len(tokens),
                num_original_tokens=count_original_tokens(document),
            )
            for document, tokens in zip(documents, encoded, strict=True)
        ],
    )


def encode_passages(tokenizer: Encoder, passages: Sequence[str]) -> list[tuple[list[int], int]]:
    """Each passage's sub-words and how many of them are its target: what follows the last space. Context and target are
    encoded together and cut where the context alone, without white space at its end, does."""
    whole = tokenizer.encode_batch(list(passages))
    before = tokenizer.encode_batch([passage.rpartition(" ")[0].rstrip() for passage in passages])
    return [(tokens, len(tokens) - len(context)) for tokens, context in zip(whole, before, strict=True)]
