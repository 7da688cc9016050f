"""Standard errors, paired differences, and one forward pass for several tasks."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_repro.evaluation.compare import paired_difference
from mlm_repro.evaluation.evaluate import share
from mlm_repro.evaluation.protocol import Request, Scores
from mlm_repro.evaluation.schema import ClozeResult
from mlm_repro.evaluation.tasks.uncertainty import (
    difference_standard_error,
    mean_standard_error,
    ratio_standard_error,
)
from mlm_repro.lineage.errors import BadInput


def losses(seed: int, blocks: int = 60) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    words = random.integers(500, 6000, blocks).astype(float)
    return words * random.normal(3.0, 0.4, blocks), words


def test_the_block_bootstrap_is_that_of_a_plain_loop() -> None:
    sums, words = losses(1)
    random = np.random.default_rng(9)
    drawn = [random.integers(0, 60, 60) for _ in range(4000)]
    expected = np.std([sums[i].sum() / words[i].sum() for i in drawn])
    assert ratio_standard_error(sums, words) == pytest.approx(expected, rel=0.06)
    assert ratio_standard_error(sums, words) == ratio_standard_error(sums, words)
    assert ratio_standard_error(sums[:1], words[:1]) is None


def test_pairing_takes_out_what_two_models_share() -> None:
    first = losses(1)
    second = first[0] + 0.01 * first[1], first[1]
    single = ratio_standard_error(*first)
    assert difference_standard_error(first, second) == pytest.approx(0, abs=1e-12)
    assert difference_standard_error(first, losses(2)) > single  # type: ignore[operator]


def test_mean_standard_error() -> None:
    assert mean_standard_error(np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx(
        math.sqrt(5 / 3 / 4)
    )
    assert mean_standard_error(np.array([1.0])) is None


def cloze(examples: list[tuple[float, bool]]) -> ClozeResult:
    made = {
        "kind": "measured",
        "checkpoint": "a",
        "checkpoint_digest": "",
        "tokenizer_digest": "",
        "dtype": "float32",
        "seconds": 0.0,
        "environment": {},
        "task": "lambada",
        "protocol": "",
        "partial": False,
        "note": "",
        "warnings": [],
        "data_digest": "",
        "perplexity": 1.0,
        "num_original_tokens": 4,
        "num_tokens": 4,
        "num_scored_tokens": 4,
        "accuracy": 0.5,
        "standard_error": 0.1,
        "perplexity_standard_error": None,
        "num_examples": len(examples),
        "num_correct": 2,
        "num_truncated": 0,
        "examples": examples,
    }
    return ClozeResult.model_validate(made)


def test_a_difference_of_accuracies_is_paired() -> None:
    first = cloze([(1.0, True), (2, False), (3, False), (4, True)])
    second = cloze([(1.0, True), (1, True), (3, False), (3, True)])
    difference = paired_difference(first, second)
    assert (difference.accuracy, difference.log_perplexity) == (0.25, -0.5)
    assert difference.accuracy_standard_error == pytest.approx(0.25)
    assert difference.log_perplexity_standard_error == pytest.approx(math.sqrt(1 / 3 / 4))
    assert difference.p == 1.0
    assert paired_difference(
        cloze([(1.0, False)] * 9), cloze([(1.0, True)] * 9)
    ).p == pytest.approx(2 / 2**9)
    with pytest.raises(BadInput, match="not scored on the same parts"):
        paired_difference(first, cloze(first.examples[:3]))


requests = st.lists(
    st.tuples(st.integers(2, 5), st.integers(1, 4))
    .filter(lambda r: r[1] < r[0])
    .map(lambda r: Request(np.arange(r[0]), r[1])),
    min_size=1,
    max_size=8,
)


@given(st.lists(requests, min_size=1, max_size=4))
def test_shared_scores_are_those_of_each_task(tasks: list[list[Request]]) -> None:
    def answer(asked: list[Request]) -> Scores:
        """Log-probabilities that tell length and place."""
        values = [
            100.0 * len(r.tokens) + place
            for r in asked
            for place in range(len(r.tokens))[-r.num_scored :]
        ]
        greedy = np.array(values) % 2 == 0
        return Scores(np.array(values), greedy, ~greedy, np.array([r.num_scored for r in asked]))

    shared, places = share(tasks)
    assert len({len(request.tokens) for request in shared}) == len(shared)
    for task, place in zip(tasks, places, strict=True):
        mine, expected = answer(shared).taken(place, task), answer(task)
        for name in ("log_probabilities", "greedy", "greedy_allowed", "num_scored"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(expected, name))
