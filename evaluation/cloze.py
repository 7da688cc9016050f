"""Prediction of a passage's last word, strictly: every sub-word of it must be the model's most likely one."""

import math
from collections.abc import Sequence

import numpy as np

from evaluation.protocol import (
    ClozeResult,
    Encoder,
    Provenance,
    Request,
    Scores,
    SourceText,
    Tokens,
    misload_warnings,
    perplexity,
)
from evaluation.windows import evenly_spread
from lineage.errors import BadInput


def split_last_word(text: str) -> tuple[str, str]:
    """The stripped context and the last white-space word, as Megatron's `--strict-lambada` splits them.

    Whatever white space stood before the word is gone; the target is encoded as a space and the word.
    """
    last = text.split()[-1]
    return text[: text.rfind(last)].strip(), last


class StrictCloze:
    """The task for a list of passages: teacher forcing, no token before the passage, no stop-word filter."""

    unit = "examples"

    def __init__(
        self,
        source: SourceText,
        passages: Sequence[str],
        tokenizer: Encoder,
        seq_length: int,
        limit: int | None = None,
    ) -> None:
        """`limit` scores only that many passages, spread evenly over the list.

        A passage longer than `seq_length` inputs loses its beginning. Raises BadInput if a target alone is
        longer.
        """
        if not passages:
            raise BadInput(f"{source.title} has no passage to score")
        self._source, self._vocab_size = source, tokenizer.vocab_size
        self._num_passages = len(passages)
        contexts, words = zip(*map(split_last_word, passages), strict=True)
        encoded_contexts = tokenizer.encode_batch(list(contexts))
        encoded_words = tokenizer.encode_batch([f" {word}" for word in words])
        self.targets: list[list[int]] = [list(ids) for ids in encoded_words]
        examples: list[Tokens] = [
            np.asarray([*context, *target], dtype=np.int64)
            for context, target in zip(encoded_contexts, self.targets, strict=True)
        ]
        self._num_tokens = sum(map(len, examples))
        self._chosen = evenly_spread(len(examples), limit)
        if (longest := max(len(self.targets[index]) for index in self._chosen)) > seq_length:
            raise BadInput(f"a target of {longest} sub-words does not fit the model's context of {seq_length}")
        self._requests = [
            Request(examples[index][-(seq_length + 1) :], len(self.targets[index])) for index in self._chosen
        ]
        self._num_truncated = sum(len(examples[index]) > seq_length + 1 for index in self._chosen)

    @property
    def name(self) -> str:
        return self._source.task

    @property
    def note(self) -> str:
        return self._source.note

    @property
    def requests(self) -> list[Request]:
        return self._requests

    def result(self, scores: Scores, provenance: Provenance) -> ClozeResult:
        """Accuracy over examples; the perplexity is of the whole target word."""
        nll = math.fsum(scores.nll)
        num_examples = len(self._chosen)
        num_scored = sum(request.num_scored for request in self._requests)
        num_correct = int(scores.all_greedy.sum())
        accuracy = num_correct / num_examples
        partial = num_examples < self._num_passages
        return ClozeResult(
            **provenance.model_dump(),
            task=self.name,
            protocol=self._describe(provenance.dtype, partial),
            partial=partial,
            note=self.note,
            warnings=misload_warnings(perplexity(nll, num_scored), self._vocab_size),
            data_digest=self._source.digest,
            perplexity=perplexity(nll, num_examples),
            num_original_tokens=self._num_passages,
            num_tokens=self._num_tokens,
            num_scored_tokens=num_scored,
            accuracy=accuracy,
            standard_error=math.sqrt(accuracy * (1 - accuracy) / max(1, num_examples - 1)),
            num_examples=num_examples,
            num_correct=num_correct,
            num_truncated=self._num_truncated,
        )

    def _describe(self, dtype: str, partial: bool) -> str:
        part = f"; only {len(self._chosen)} of {self._num_passages} examples" if partial else ""
        cut = f"; {self._num_truncated} examples cut at the left to the model's context" if self._num_truncated else ""
        return (
            f"{self._source.title}; last white-space word, correct only if the most likely token is right at "
            f"each of its sub-words; teacher forcing, nothing before the passage, no stop-word filter; "
            f"{dtype}{cut}{part}"
        )
