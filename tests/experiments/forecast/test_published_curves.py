"""The law through three models gives a fourth, and the published curve leaves it."""

import math
from collections.abc import Callable
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_repro.experiments.catalogue import Claim, every_claim, find_experiment
from mlm_repro.experiments.files import FITTED, HELD_OUT
from mlm_repro.experiments.forecast.published import extrapolated, parameters_of
from mlm_repro.lineage.errors import BadInput

SERIES = ("345m", "775m", "2.5b", "8.3b")


def claims_of(losses: dict[str, float]) -> list[Claim]:
    like = next(
        claim for claim in every_claim() if claim.id == "2019/blog-august/8.3b/validation-1"
    )
    return [
        Claim(**{**like.model_dump(), "series": name, "value": str(math.exp(loss))})
        for name, loss in losses.items()
    ]


@settings(max_examples=10)  # each solves for a thousand readings
@given(floor=st.floats(1, 3), height=st.floats(0.3, 1.5), exponent=st.floats(0.1, 0.8))
def test_a_law_is_found_again(floor: float, height: float, exponent: float) -> None:
    law = {name: floor + height * (parameters_of(name) / 1e9) ** -exponent for name in SERIES}
    ((number, known),) = extrapolated(claims_of(law), "sizes")
    assert math.log(number["value"]) == pytest.approx(law["8.3b"], abs=1e-6)
    assert number["low"] < number["value"] < number["high"]
    assert known == pytest.approx(math.exp(law["2.5b"])), "as the largest model of the fit"


def test_the_held_out_point_is_not_looked_at() -> None:
    law = {name: 2 + 0.5 * (parameters_of(name) / 1e9) ** -0.3 for name in SERIES}
    same = extrapolated(claims_of(law | {"8.3b": 99.0 / 50}), "sizes")
    assert same == extrapolated(claims_of(law), "sizes")


def test_the_published_curve_lies_above_the_law_most_at_its_end() -> None:
    claims = find_experiment("2019/scaling-law").claims
    found = {number["x"]: number for number, _ in extrapolated(claims, "sizes")}
    published = {claim.x: float(claim.value) for claim in claims if claim.series == "8.3b"}
    assert found.keys() == published.keys() == set(range(1, 9))
    above = [published[x] / number["value"] - 1 for x, number in found.items()]
    assert all(0 < each < 0.025 for each in above[:3])
    assert 0.03 < above[-1] == max(above)


def test_a_name_without_a_size_is_refused() -> None:
    with pytest.raises(BadInput, match="does not say how many parameters"):
        parameters_of("large")


def figure_6(loss: Callable[[str, float], float] | None = None) -> list[Claim]:
    """Figure 6 as published, or with the losses of another law at its places."""
    claims = find_experiment("2019/figure-6").claims
    if loss is None:
        return list(claims)
    return [
        claim.model_copy(
            update={"value": Decimal(f"{math.exp(loss(claim.series, claim.x or 0)):.6f}")}
        )
        for claim in claims
    ]


def law(series: str, iterations: float) -> float:
    return 1.7 + 0.3 * (parameters_of(series) / 8.3e9) ** -0.3 + 0.2 * (iterations / 3e5) ** -0.4


def test_a_law_over_tokens_is_found_again_from_a_third_of_training() -> None:
    for number, known in extrapolated(figure_6(law), "tokens"):
        assert math.log(number["value"]) == pytest.approx(
            law(number["series"], number["x"]), abs=1e-4
        )
        assert number["low"] < number["value"] < number["high"]
        assert math.log(known) == pytest.approx(law(number["series"], 1e5), abs=1e-4), (
            "as at the last point of the fit"
        )


def test_what_is_held_out_of_the_law_over_tokens_is_not_looked_at() -> None:
    def changed(series: str, iterations: float) -> float:
        return law(series, iterations) + (0.5 if iterations > 1e5 else 0.0)

    ours, same = (
        [each for each, _ in extrapolated(figure_6(by), "tokens")] for by in (law, changed)
    )
    assert [number["value"] for number in ours] == pytest.approx(
        [number["value"] for number in same]
    )
    assert {number["x"] > 1e5: number["note"] for number in ours} == {False: FITTED, True: HELD_OUT}


def test_the_published_larger_model_ends_below_the_law_over_tokens() -> None:
    """Larger models gain more from each token than a sum of two powers can say."""
    published = {(claim.series, claim.x): float(claim.value) for claim in figure_6()}
    last = [number for number, _ in extrapolated(figure_6(), "tokens") if number["x"] == 300_000]
    above = {
        number["series"]: number["value"] / published[number["series"], 300_000] - 1
        for number in last
    }
    assert above["355m"] < 0 < above["2.5b"] < above["8.3b"]
    (largest,) = (number for number in last if number["series"] == "8.3b")
    assert published["8.3b", 300_000] < largest["low"]
