"""The noise scale of gradients whose mean and covariance are known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.guard.noise_scale import GradientMoments, gradient_moments, noise_scale


@pytest.mark.parametrize(("noise", "ranks", "local"), [(0.5, 4, 8), (2.0, 8, 4), (5.0, 2, 16)])
def test_a_quadratics_noise_scale_is_found(noise: float, ranks: int, local: int) -> None:
    """Loss ½(x − c)ᵀH(x − c) with a centre c ~ N(0, noise²) for each sample: G = Hx and Σ = noise²·H²."""
    random = np.random.RandomState(0)
    curvature, x = np.linspace(0.5, 2.0, 50), np.ones(50)
    expected = noise**2 * (curvature**2).sum() / ((curvature * x) ** 2).sum()
    found = []
    for _ in range(400):
        gradients = curvature * (x - noise * random.randn(ranks, local, 50))
        of_ranks = gradients.mean(axis=1)
        local_square = (of_ranks**2).sum(axis=1).mean()
        found.append(gradient_moments(local_square, local, (of_ranks.mean(axis=0) ** 2).sum(), ranks * local))
    assert noise_scale(found) == pytest.approx(expected, rel=0.1)


@given(
    square=st.floats(1e-6, 1e6), variance=st.floats(1e-6, 1e6), small=st.integers(1, 100), factor=st.integers(2, 100)
)
def test_expected_norms_give_back_the_moments(square: float, variance: float, small: int, factor: int) -> None:
    norms = [square + variance / batch for batch in (small, small * factor)]
    moments = gradient_moments(norms[0], small, norms[1], small * factor)
    assert moments.square == pytest.approx(square, rel=1e-6, abs=1e-6 * variance)
    assert moments.variance == pytest.approx(variance, rel=1e-6, abs=1e-6 * square * small)


def test_what_cannot_be_told_is_not_said() -> None:
    assert noise_scale([GradientMoments(-1.0, 5.0)]) is None
    assert noise_scale([]) is None
    with pytest.raises(ValueError, match="do not tell noise from gradient"):
        gradient_moments(1.0, 4, 1.0, 4)
