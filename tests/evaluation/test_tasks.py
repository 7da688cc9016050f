"""Perplexity and cloze tasks on models whose numbers can be computed by hand."""

import math

import numpy as np
import pytest
import torch

from mlm_repro.evaluation.protocol import Scores, SourceText, perplexity
from mlm_repro.evaluation.schema import PerplexityResult, Provenance
from mlm_repro.evaluation.scoring.scores import score
from mlm_repro.evaluation.tasks.cloze import STOP_WORD_FILTER, STRICT, ClozeTask
from mlm_repro.evaluation.tasks.documents import RunningText
from mlm_repro.evaluation.tasks.perplexity import UNCHANGED, PerplexityTask, sliding_stream
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from tests.evaluation.standins import Bigram, Bytes, made_up_scores, scoring_model

SOURCE = SourceText("some-task", "some text", "digest of the text")
PROVENANCE = Provenance(
    kind="measured",
    checkpoint="here",
    checkpoint_digest="c",
    tokenizer_digest="t",
    dtype="float32",
    seconds=1.0,
    environment={},
)
TEXT = "Some words stand here , in a row of words that nobody would ever want to read aloud . " * 7


def sliding_task(text: str, seq_length: int, limit: int | None = None) -> PerplexityTask:
    running = RunningText.of_documents(SOURCE, [text])
    stream = sliding_stream(running, UNCHANGED, Bytes(), seq_length, max(1, seq_length // 32))
    return PerplexityTask(running, stream, Bytes()).limited(limit)


def uniform_perplexity(limit: int | None = None) -> PerplexityResult:
    task = sliding_task(TEXT, 64, limit)
    model = scoring_model(Bigram(torch.zeros(256, 256)), 256, 64)
    return task.result(score(model, task.requests, workers=1), PROVENANCE)


def test_a_uniform_model_has_the_vocabulary_as_its_perplexity() -> None:
    result = uniform_perplexity()
    num_tokens, num_original_tokens = len(TEXT.encode()), len(TEXT.strip().split(" "))
    assert result.num_tokens == num_tokens
    assert result.num_scored_tokens == num_tokens - 1
    assert result.num_original_tokens == num_original_tokens == result.normaliser
    assert result.subword_perplexity == pytest.approx(256, rel=1e-12)
    assert result.perplexity == pytest.approx(
        256 ** ((num_tokens - 1) / num_original_tokens), rel=1e-12
    )
    assert result.bits_per_byte == pytest.approx(8 * (num_tokens - 1) / num_tokens, rel=1e-12)
    assert result.token_ratio == (num_tokens - 1) / (num_original_tokens - 1)
    assert not result.partial


def test_megatron_names_carry_megatron_s_divisor_and_clamp() -> None:
    result = uniform_perplexity()
    assert result.megatron["avg loss"] == pytest.approx(math.log(256))
    assert result.megatron["ppl"] == pytest.approx(256)
    assert result.megatron["token ratio"] == result.token_ratio
    assert math.log(256) * result.token_ratio > 20
    assert result.megatron["adjusted ppl"] == math.exp(20)


def test_a_limit_keeps_the_scale_and_says_that_it_is_partial() -> None:
    whole, part = uniform_perplexity(), uniform_perplexity(limit=5)
    assert part.partial
    assert part.num_windows == 5
    assert part.num_scored_tokens == 5 * 2  # stride 64 / 32
    assert part.normaliser == pytest.approx(whole.normaliser * 10 / whole.num_scored_tokens)
    assert part.perplexity == pytest.approx(whole.perplexity, rel=1e-12)
    assert part.bits_per_byte == pytest.approx(whole.bits_per_byte, rel=1e-12)
    assert "only 5 of" in part.protocol
    assert "only" not in whole.protocol
    assert not uniform_perplexity(limit=10**6).partial


def test_guessing_is_warned_of() -> None:
    assert "untrained or was loaded wrongly" in uniform_perplexity().warnings[0]
    task = sliding_task(TEXT, 64)
    wrong = [False] * len(task.requests)
    just_below = task.result(made_up_scores(task.requests, math.log(127.0), wrong), PROVENANCE)
    assert just_below.warnings == []
    assert task.result(made_up_scores(task.requests, math.log(129.0), wrong), PROVENANCE).warnings


def test_the_protocol_line_says_what_was_done() -> None:
    line = uniform_perplexity().protocol
    for part in (
        "some text",
        "detokenizer none",
        "window 64",
        "stride 2",
        "exp(summed loss / ",
        "float32",
    ):
        assert part in line


@pytest.mark.parametrize("nll", [float("nan"), float("inf"), 1e9])
def test_a_loss_without_a_perplexity_is_refused(nll: float) -> None:
    with pytest.raises(IntegrityFailure, match="diverged"):
        perplexity(nll, 2)


def test_a_text_without_spaces_is_no_diverged_checkpoint() -> None:
    task = sliding_task("without-any-space-" * 200 + " end", 64)
    scores = score(scoring_model(Bigram(torch.zeros(256, 256)), 256, 64), task.requests, workers=1)
    result = task.result(scores, PROVENANCE)
    assert result.perplexity is None
    assert result.loss_per_token == pytest.approx(math.log(256))
    assert any(
        "some text has 2 words between spaces for 3,604 sub-words" in each
        for each in result.warnings
    )
    diverged = made_up_scores(task.requests, 1e9, [False] * len(task.requests))
    with pytest.raises(IntegrityFailure, match="diverged"):
        task.result(diverged, PROVENANCE)


def successor_model(known: str) -> Bigram:
    """Predicts each byte of `known` after the one before it, and byte 0 elsewhere."""
    table = torch.zeros(256, 256)
    table[:, 0] = 1.0
    for before, after in zip(known.encode(), known.encode()[1:], strict=False):
        table[before, after] = 5.0
    return Bigram(table)


def test_every_subword_of_the_target_must_be_right() -> None:
    passages = ["a dog ran xyz", "a dog ran qyz"]
    task = ClozeTask(SOURCE, passages, STRICT, Bytes(), 32)
    assert [request.num_scored for request in task.requests] == [4, 4]
    assert bytes(task.requests[1].tokens.tolist()) == b"a dog ran qyz"
    scores = score(scoring_model(successor_model("n xyz"), 256), task.requests, workers=1)
    # Of " qyz" the last sub-words y, z would be right.
    assert list(scores.all_greedy) == [
        True,
        False,
    ]
    result = task.result(scores, PROVENANCE)
    assert result.accuracy == 0.5
    assert result.standard_error == pytest.approx(math.sqrt(0.25 / 1))
    assert (result.num_correct, result.num_examples, result.num_scored_tokens) == (1, 2, 8)
    assert result.perplexity == pytest.approx(math.exp(scores.nll.mean()))


def test_long_examples_lose_their_beginning_and_are_counted() -> None:
    task = ClozeTask(SOURCE, ["one two three four", "a b"], STRICT, Bytes(), 9)
    assert bytes(task.requests[0].tokens.tolist()) == b"three four"
    model = scoring_model(Bigram(torch.zeros(256, 256)), 256, 9)
    result = task.result(score(model, task.requests, workers=1), PROVENANCE)
    assert result.num_truncated == 1
    assert "1 example cut at the left" in result.protocol
    assert result.num_tokens == len("one two three four") + len("a b")


def test_a_target_longer_than_the_context_is_refused() -> None:
    with pytest.raises(BadInput, match="tokens of a window or passage are to be scored"):
        ClozeTask(SOURCE, ["a incomprehensible"], STRICT, Bytes(), 8).limited(None)


def test_cloze_limit_is_partial_and_spread() -> None:
    passages = [f"this is passage number {number:03d}" for number in range(100)]
    task = ClozeTask(SOURCE, passages, STRICT, Bytes(), 64).limited(4)
    assert [bytes(request.tokens.tolist())[-3:] for request in task.requests] == [
        b"012",
        b"037",
        b"062",
        b"087",
    ]
    scores = made_up_scores(task.requests, 1.0, [True, False, False, True])
    result = task.result(scores, PROVENANCE)
    assert result.partial
    assert result.num_examples == 4
    assert result.num_original_tokens == 100
    assert "only 4 of 100" in result.protocol


def test_a_stop_word_is_forgiven_at_the_first_sub_word_only() -> None:
    passages = [f"passage {number} with a last word" for number in range(4)]
    strict, filtered = (
        ClozeTask(SOURCE, passages, rule, Bytes(), 64) for rule in (STRICT, STOP_WORD_FILTER)
    )
    assert strict.banned is None
    assert filtered.banned is not None
    assert {chr(token) for token in filtered.banned} == set("aistAIST")
    counts = np.array([request.num_scored for request in filtered.requests])
    greedy, allowed = np.ones(counts.sum(), dtype=bool), np.ones(counts.sum(), dtype=bool)
    first = np.cumsum(counts) - counts
    greedy[first[1]] = False  # a stop word came first: forgiven
    greedy[first[2]] = allowed[first[2]] = False  # so did another word
    greedy[first[3] + 1] = False  # wrong later, where stop words are not forgiven
    scores = Scores(np.full(counts.sum(), -1.0), greedy, allowed, counts)
    results = [task.result(scores, PROVENANCE) for task in (strict, filtered)]
    assert [result.num_correct for result in results] == [1, 2]
    assert results[0].perplexity == results[1].perplexity
    assert "no stop word" in results[1].protocol
