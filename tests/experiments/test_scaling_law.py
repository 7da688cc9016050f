"""The law through three models gives a fourth, and the published curve leaves it."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.catalogue import Claim, every_claim, find_experiment
from experiments.scaling_law import beside_published, extrapolated, parameters_of, published_exponent
from lineage.errors import BadInput

SERIES = ("345m", "775m", "2.5b", "8.3b")


def claims_of(losses: dict[str, float]) -> list[Claim]:
    like = next(claim for claim in every_claim() if claim.id == "2019/blog-august/8.3b/validation-1")
    return [
        Claim(**{**like.model_dump(), "series": name, "value": str(math.exp(loss))}) for name, loss in losses.items()
    ]


@settings(max_examples=10)  # each solves for a thousand readings
@given(floor=st.floats(1, 3), height=st.floats(0.3, 1.5), exponent=st.floats(0.1, 0.8))
def test_a_law_is_found_again(floor: float, height: float, exponent: float) -> None:
    law = {name: floor + height * (parameters_of(name) / 1e9) ** -exponent for name in SERIES}
    (number,) = extrapolated(claims_of(law), "8.3b")
    assert math.log(number["value"]) == pytest.approx(law["8.3b"], abs=1e-6)
    assert number["low"] < number["value"] < number["high"]


@settings(max_examples=10)
@given(floor=st.floats(1, 3), height=st.floats(0.3, 1.5), exponent=st.floats(0.1, 0.8))
def test_the_exponent_of_a_law_is_found_again(floor: float, height: float, exponent: float) -> None:
    law = {name: floor + height * (parameters_of(name) / 1e9) ** -exponent for name in SERIES}
    found, low, high = published_exponent(claims_of(law), SERIES[:3])
    assert found == pytest.approx(exponent, abs=1e-6)
    assert low < found < high


def test_the_published_exponent_stands_beside_another() -> None:
    assert "the intervals overlap" in beside_published(0.4, 0.1, 0.9)
    assert "the intervals do not overlap" in beside_published(0.015, 0.01, 0.02)


def test_the_held_out_point_is_not_looked_at() -> None:
    law = {name: 2 + 0.5 * (parameters_of(name) / 1e9) ** -0.3 for name in SERIES}
    same = extrapolated(claims_of(law | {"8.3b": 99.0 / 50}), "8.3b")
    assert same == extrapolated(claims_of(law), "8.3b")


def test_the_published_curve_lies_above_the_law_most_at_its_end() -> None:
    claims = find_experiment("2019/scaling-law").claims
    found = {number["x"]: number for number in extrapolated(claims, "8.3b")}
    published = {claim.x: float(claim.value) for claim in claims if claim.series == "8.3b"}
    assert found.keys() == published.keys() == set(range(1, 9))
    above = [published[x] / number["value"] - 1 for x, number in found.items()]
    assert all(0 < each < 0.025 for each in above[:3])
    assert 0.03 < above[-1] == max(above)


def test_a_name_without_a_size_is_refused() -> None:
    with pytest.raises(BadInput, match="does not say how many parameters"):
        parameters_of("large")
