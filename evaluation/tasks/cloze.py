"""Prediction of a passage's last word, by rules with different targets and different right
answers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mlm_repro.evaluation.protocol import (
    Encoder,
    Flags,
    Floats,
    Request,
    Scores,
    SourceText,
    Task,
    perplexity,
    shown_first,
    with_first,
)
from mlm_repro.evaluation.schema import ClozeResult, Provenance
from mlm_repro.evaluation.tasks.uncertainty import mean_standard_error
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.errors import BadInput

_STOP_WORDS = """
a about above after again against all am an and any are as at be because been before being below
between both but by can did do does doing don down during each few for from further had has have
having he her here hers herself him himself his how i if in into is it its itself just me more most
my myself no nor not now of off on once only or other our ours ourselves out over own s same she
should so some such t than that the their theirs them themselves then there these they this those
through to too under until up very was we were what when where which while who whom why will with
you your yours yourself yourselves
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
"""NLTK's English stop words without apostrophes, as in cybertronai/bflm's evaluation of GPT-2.

The GPT-2 paper reports LAMBADA with "a stop-word filter" (section 3.3) and names neither list nor
rule; bflm's `eval_lambada_slow.py` is the reconstruction that others refer to. It rejects a stop
word at every sub-word that it generates. Here only the first sub-word of the answer must not be
one, since later sub-words ("an", "her") are parts of words.
"""
Encoded = list[tuple[list[int], int]]
"""List of a pair for each passage: its token ids, and the number of target sub-words at its end."""


def split_last_word(text: str) -> tuple[str, str]:
    """Return a pair: the text before its last white-space word, stripped, and that word, as
    Megatron's `--strict-lambada` has them. The text has a word; if it has only one, the context is
    empty.

    White space before the word is dropped; the target is encoded as a space and the word.
    """
    last = text.split()[-1]
    return text[: text.rfind(last)].strip(), last


def encode_strictly(tokenizer: Encoder, passages: Sequence[str]) -> Encoded:
    """Return a list of a pair for each passage: its token ids, and the number of them at its end
    that are the target, its last white-space word. There must be a passage, and a word in each.
    Context and ` word` are encoded separately. If the tokenizer encodes `a b` otherwise than `a`
    and ` b`, as one that puts a space before every text, they are encoded together and cut at the
    length of the context alone."""
    contexts, words = zip(*map(split_last_word, passages), strict=True)
    if tokenizer.encode("a b") != [*tokenizer.encode("a"), *tokenizer.encode(" b")]:
        return _cut(
            tokenizer, [" ".join(pair) for pair in zip(contexts, words, strict=True)], contexts
        )
    before = tokenizer.encode_batch([*contexts])
    targets = tokenizer.encode_batch([f" {word}" for word in words])
    return [
        ([*context, *target], len(target)) for context, target in zip(before, targets, strict=True)
    ]


def encode_passages(tokenizer: Encoder, passages: Sequence[str]) -> Encoded:
    """Return a list of a pair for each passage: its token ids, and the number of them at its end
    that are the target, what follows the last space; without a space the target is the whole
    passage.

    Context and target are encoded together and cut at the length of the context alone, without
    white space at its end.
    """
    return _cut(tokenizer, passages, [passage.rpartition(" ")[0].rstrip() for passage in passages])


def _cut(tokenizer: Encoder, passages: Sequence[str], contexts: Sequence[str]) -> Encoded:
    """Return a list of a pair for each passage: its token ids, encoded whole, and how many more ids
    it has than its context alone, the number of target sub-words at its end. `contexts` are the
    passages' beginnings, as texts."""
    whole = tokenizer.encode_batch([*passages])
    before = tokenizer.encode_batch([*contexts])
    return [
        (tokens, len(tokens) - len(context)) for tokens, context in zip(whole, before, strict=True)
    ]


def encode_for_last_token(tokenizer: Encoder, passages: Sequence[str]) -> Encoded:
    """Return a list of a pair for each passage: its token ids, and 1, as the target is the last
    sub-word alone, as Megatron has it without `--strict-lambada`."""
    return [(tokens, 1) for tokens in tokenizer.encode_batch(list(passages))]


@dataclass(frozen=True)
class ClozeRule:
    """Rule of a last-word test: a sentence for the protocol line, the function that encodes
    passages with their targets at the end, and whether stop words are ruled out as the first
    sub-word of an answer."""

    sentence: str
    encode: Callable[[Encoder, Sequence[str]], Encoded]
    filters_stop_words: bool = False


STRICT = ClozeRule(
    "last white-space word, correct only if the most likely token is right at each of its"
    " sub-words; teacher forcing, nothing before the passage, no stop-word filter",
    encode_strictly,
)
LAST_TOKEN = ClozeRule(
    "last sub-word only, correct if it is the most likely token; nothing before the passage, no"
    " stop-word filter",
    encode_for_last_token,
)
STOP_WORD_FILTER = ClozeRule(
    "last white-space word, correct only if the most likely token is right at each of its"
    " sub-words, the first among those that are no stop word; teacher forcing, nothing before the"
    " passage; perplexity without the filter",
    encode_strictly,
    filters_stop_words=True,
)
LM_EVAL = ClozeRule(
    "what follows the last space, newlines in it included, encoded with its context, correct only"
    " if the most likely token is right at each of its sub-words (lm-evaluation-harness); nothing"
    " before the passage, no stop-word filter",
    encode_passages,
)


class ClozeTask(Task):
    """Task of predicting the last word, or the last sub-word, of each of `passages`, texts, as
    `rule`, a ClozeRule, says. Each passage is a request and loses its beginning if it has more than
    `seq_length` inputs. The result has the accuracy over passages and the perplexity of their
    targets."""

    unit = "examples"

    def __init__(
        self,
        source: SourceText,
        passages: Sequence[str],
        rule: ClozeRule,
        tokenizer: Encoder,
        seq_length: int,
    ) -> None:
        """Encode each of the `passages` by `rule`, with the tokenizer's first tokens before it, as
        one of the task's `requests`. A passage longer than `seq_length` inputs loses its beginning,
        the first tokens included. If the rule filters stop words, the attribute `banned` becomes an
        array of the ids whose text is a stop word, in any case, with or without space around it;
        else it stays None.

        Raises BadInput if there is no passage, or if no token is left before a target.
        """
        if not passages:
            raise BadInput(
                f"{source.title} has no passage to score: name a file with a passage that is not"
                " blank"
            )
        examples = rule.encode(tokenizer, passages)

        def request(example: tuple[list[int], int]) -> Request:
            ids = with_first(tokenizer, example[0])
            count = example[1]
            return Request(np.asarray(ids[-(seq_length + 1) :], dtype=np.int64), count)

        super().__init__(source, tokenizer, [*map(request, examples)], passages)
        # Whole stop words, in any case, with or without a space before them.
        if rule.filters_stop_words:
            texts = (tokenizer.decode([token]) for token in range(tokenizer.vocab_size))
            banned = [
                token for token, text in enumerate(texts) if text.strip().lower() in STOP_WORDS
            ]
            self.banned = np.asarray(banned, dtype=np.int64)
        self._passages = passages
        self._seq_length = seq_length
        self._rule = rule.sentence.replace(
            "nothing before the", f"{shown_first(tokenizer)} before the"
        )
        self._lengths = [len(with_first(tokenizer, ids)) for ids, _ in examples]

    def text(self, index: int) -> str:
        """Return as a string the passage of the request that has the number `index`, from 0, in
        this task's `requests`. The passage is whole, even if the request lost its beginning."""
        return self._passages[self.chosen[index]]

    @property
    def counts(self) -> JSON:
        """Dict name of the result's field → number, of the three that need no scores: in the whole
        test the number of passages and the number of sub-words, first tokens included; and the
        number of scored passages that lose their beginning."""
        cut = sum(self._lengths[number] > self._seq_length + 1 for number in self.chosen)
        sizes = {"num_original_tokens": len(self._passages), "num_tokens": sum(self._lengths)}
        return {**sizes, "num_truncated": cut}

    def result(self, scores: Scores, provenance: Provenance) -> ClozeResult:
        """Return this task's ClozeResult: accuracy over examples, perplexity of whole targets,
        their standard errors, the text's counts and the checkpoint's provenance. `scores` has the
        scores of `requests`. Raises IntegrityFailure for a loss that is not finite or too large for
        a perplexity."""
        losses = scores.nll
        correct = self.correct(scores)
        counts = self.counts
        truncated = counts["num_truncated"]
        examples = "1 example" if truncated == 1 else f"{truncated:,} examples"
        cut = f"; {examples} cut at the left to the model's context" if truncated else ""
        return ClozeResult(
            **self.facts(scores, provenance),
            **counts,
            **cloze_numbers(losses, correct),
            protocol=f"{self.source.title}; {self._rule}; {provenance.dtype}{cut}{self.extent}",
            examples=list(zip(losses.tolist(), correct.tolist(), strict=True)),
        )

    def correct(self, scores: Scores) -> Flags:
        """Return for each example, as a boolean array [examples], whether it is right: each of its
        scored tokens was the most likely token, but with a filter of stop words its first scored
        token need only be the most likely of the tokens that are not banned. `scores` has the
        scores of `requests`."""
        if self.banned is None:
            return scores.all_greedy
        right = scores.greedy.copy()
        right[scores.starts] = scores.greedy_allowed[scores.starts]
        return np.logical_and.reduceat(right, scores.starts)


def cloze_numbers(losses: Floats, correct: Flags) -> JSON:
    """Return a dict name of the result's field → number: accuracy and perplexity with their
    standard errors, and counts. They come from each target's loss in nats, [examples], and whether
    it is right, [examples]. The perplexity's standard error is None for one example. Raises
    IntegrityFailure for a loss that is not finite or too large for a perplexity."""
    target = perplexity(math.fsum(losses), len(losses))
    spread = mean_standard_error(losses)
    return accuracy_numbers(int(correct.sum()), len(losses)) | {
        "perplexity": target,
        "perplexity_standard_error": None if spread is None else target * spread,
    }


def accuracy_numbers(num_correct: int, num_examples: int) -> JSON:
    """Return a dict name of a result's field → number, for `num_correct` right answers to
    `num_examples` examples, at least 1: both arguments under their own names, the share p of right
    answers, from 0 to 1, under `accuracy`, and its standard error, √(p(1 − p)/(n − 1)) for n
    examples and 0 for one, under `standard_error`."""
    accuracy = num_correct / num_examples
    error = math.sqrt(accuracy * (1 - accuracy) / max(1, num_examples - 1))
    return {
        "num_correct": num_correct,
        "num_examples": num_examples,
        "accuracy": accuracy,
        "standard_error": error,
    }
