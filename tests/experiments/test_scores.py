"""Bits per byte and paired differences with intervals over articles and seeds."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_repro.evaluation.schema import PerplexityResult
from mlm_repro.evaluation.tasks.uncertainty import ratio_standard_error
from mlm_repro.experiments.files import Comparison, ReproductionScores, TextScore, read_evaluations
from mlm_repro.experiments.scores import NORMAL, compared, order_findings, order_verdict, text_score
from mlm_repro.lineage.errors import IntegrityFailure
from mlm_repro.lineage.files import parse_document
from mlm_repro.lineage.records import Record
from mlm_repro.lineage.shipped import HOME

WORDS = np.array([50.0, 80.0, 120.0, 60.0, 90.0, 200.0])
ORDER_CLAIMS = ("2019/size/2.5b", "2019/size/8.3b")
BITS_OF_A_NAT = 0.25
"""Bits per byte of a nat per word."""


def score(nats_per_word: Sequence[float]) -> TextScore:
    nll = np.array(nats_per_word) * WORDS
    return TextScore(
        bits_per_byte=BITS_OF_A_NAT * nll.sum() / WORDS.sum(),
        nll=nll.tolist(),
        words=WORDS.tolist(),
    )


LARGE = [9.0, 10.0, 9.5, 11.0, 10.5, 9.8]
SMALL = [9.3, 10.1, 9.9, 11.1, 10.9, 10.2]


def width(comparison: Comparison) -> float:
    return comparison.high - comparison.low


def test_the_difference_is_paired_over_articles() -> None:
    paired = compared("text", 0, 1, [[score(SMALL)], [score(LARGE)]])
    assert paired.difference == pytest.approx(
        score(LARGE).bits_per_byte - score(SMALL).bits_per_byte
    )
    assert paired.low < paired.difference < paired.high < 0
    level = ratio_standard_error(np.array(score(LARGE).nll), WORDS)
    assert level
    # What makes an article hard makes it hard for both.
    assert width(paired) < NORMAL * level * BITS_OF_A_NAT
    constant = compared("text", 0, 1, [[score([x + 0.5 for x in LARGE])], [score(LARGE)]])
    assert (constant.low, constant.high) == pytest.approx((-0.125, -0.125))


def test_seeds_that_differ_widen_the_interval_by_students_t() -> None:
    offsets = (-0.2, 0.0, 0.2)
    seeds = [[score([x + offset for x in SMALL]) for offset in offsets], [score(LARGE)] * 3]
    one, three = (
        compared("text", 0, 1, [[score(SMALL)], [score(LARGE)]]),
        compared("text", 0, 1, seeds),
    )
    assert three.difference == pytest.approx(one.difference)
    of_articles, of_seeds = width(one) / 2 / NORMAL, BITS_OF_A_NAT * 0.2 / math.sqrt(3)
    error = math.hypot(of_articles, of_seeds)
    assert NORMAL * error < width(three) / 2 < 2.92 * error  # t of 2 degrees of freedom is 2.920
    same = compared("text", 0, 1, [[score(SMALL)] * 3, [score(LARGE)] * 3])
    assert width(same) == pytest.approx(width(one))


def test_the_interval_holds_the_difference_as_often_as_it_says() -> None:
    noise, held, draws = np.random.default_rng(0), 0, 200
    for _ in range(draws):
        models = [[], []]  # type: list[list[TextScore]]
        hard = noise.normal(10, 1, len(WORDS))
        of_articles = noise.normal(0.4, 0.2, len(WORDS))
        for _ in range(3):
            models[1].append(score(hard + noise.normal(0, 0.3)))
            models[0].append(score(hard + of_articles + noise.normal(0, 0.3)))
        found = compared("text", 0, 1, models)
        held += found.low <= -0.4 * BITS_OF_A_NAT <= found.high
    assert 0.83 <= held / draws <= 0.97


@given(
    st.lists(st.floats(5, 15), min_size=6, max_size=6),
    st.lists(st.floats(5, 15), min_size=6, max_size=6),
)
def test_the_other_way_round_is_the_same_with_another_sign(
    first: list[float], second: list[float]
) -> None:
    one = compared("text", 0, 1, [[score(first)], [score(second)]])
    other = compared("text", 0, 1, [[score(second)], [score(first)]])
    assert (-other.high, -other.difference, -other.low) == pytest.approx(
        (one.low, one.difference, one.high), abs=1e-9
    )


def test_words_of_an_article_are_those_of_the_part_that_was_scored() -> None:
    kept = read_evaluations(HOME / "results" / "reproduce-8.3b")["8.3b-wikitext103"]
    result = parse_document(kept, PerplexityResult, "8.3b-wikitext103")
    found = text_score(result)
    assert sum(found.words) == pytest.approx(result.normaliser, rel=0.01)
    assert sum(found.nll) == pytest.approx(
        result.loss_per_token * result.num_scored_tokens, rel=1e-5
    )
    error = ratio_standard_error(np.array(found.nll), np.array(found.words))
    assert error
    of_bits = result.bits_per_byte_error
    assert of_bits == pytest.approx(
        error * result.bits_per_byte / math.log(result.perplexity), rel=0.02
    )


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            (-0.05, -0.06, -0.04),
            "On text B takes 0.050 bits per byte fewer than A (90 %: 0.040 to 0.060)",
        ),
        (
            (0.05, 0.04, 0.06),
            "On text B takes 0.050 bits per byte more than A (90 %: 0.040 to 0.060)",
        ),
        (
            (-0.01, -0.03, 0.01),
            (
                "On text B takes 0.010 bits per byte fewer than A (90 %: -0.010 to 0.030); the"
                " interval has zero in it"
            ),
        ),
    ],
)
def test_a_difference_is_said_with_its_sign_and_whether_it_may_be_none(
    values: tuple[float, float, float], sentence: str
) -> None:
    difference, low, high = values
    comparison = Comparison(
        text="text", smaller=0, larger=1, difference=difference, low=low, high=high
    )
    assert comparison.sentence(["A", "B"]) == sentence


@pytest.mark.parametrize(
    ("ends", "outcomes", "sentence"),
    [
        (
            [(81.0, 66.0, 54.0), (82.0, 66.5, 54.1), (80.0, 65.0, 54.2)],
            ["confirmed"] * 2,
            (
                "Larger models end lower, as in the paper, in each of 3 seeds: 355m 81 > 2.5b 65.8"
                " > 8.3b 54.1 in validation perplexity; every paired interval excludes zero."
            ),
        ),
        (
            [(81.0, 66.0, 54.0), (82.0, 66.5, 67.0), (80.0, 65.0, 54.2)],
            ["confirmed", "undecided"],
            (
                "The paper's order does not hold beyond chance in each of 3 seeds: 355m 81, 2.5b"
                " 65.8, 8.3b 58.4"
            ),
        ),
        (
            [(81.0, 66.0, 67.0), (82.0, 66.5, 67.6), (80.0, 65.0, 66.1)],
            ["confirmed", "contradicted"],
            "The paper's order does not hold",
        ),
        ([(81.0, 66.0, 54.0)], [], "Larger models end lower, as in the paper, in one seed: "),
        ([(81.0,)], [], "One size was trained"),
    ],
)
def test_the_order_of_the_sizes_is_a_finding_on_the_claim(
    ends: list[tuple[float, ...]], outcomes: list[str], sentence: str
) -> None:
    records = [
        Record(
            experiment="2019/validation",
            series=series,
            quantity="final_validation_perplexity",
            value=value,
            x=9,
            kind="scaled",
            source="s",
            digest="0" * 64,
            seed=seed,
        )
        for seed, values in enumerate(ends)
        for series, value in zip(("355m", "2.5b", "8.3b"), values, strict=False)
    ]
    assert order_verdict(records, None, {}).startswith(sentence)
    findings = order_findings(records)
    assert [(each.effect.claim, each.outcome) for each in findings] == [
        *zip(ORDER_CLAIMS, outcomes, strict=False)
    ]


def test_a_comparison_of_no_model_is_refused() -> None:
    comparison = {"text": "t", "smaller": 0, "larger": 1, "difference": 0, "low": 0, "high": 0}
    values = {"text": "t", "articles": 2, "seeds": 1, "models": ["a"]}
    parse_document({**values, "comparisons": []}, ReproductionScores, "scores.json")
    with pytest.raises(IntegrityFailure, match="`smaller` and `larger` of a comparison"):
        parse_document({**values, "comparisons": [comparison]}, ReproductionScores, "scores.json")
