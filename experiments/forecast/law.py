"""Fits the law of a ladder's losses and forecasts its largest rung from the others. Imports no
torch.

loss(N, D) = E + A / N^α + B · N^γ / D^β is fitted to the means over seeds of the validation losses
in the last half of each training, by least squares of relative differences. N counts the
embeddings, as the published curve's sizes do. With γ = 0 it is Equation 2 of Hoffmann et al.
(2022), arXiv 2203.15556; the interaction γ of size and length is from Li et al. (2025), arXiv
2506.10972. The interval is a bootstrap over rungs and their seeds, with the spread of one seed and
the law's errors on rungs that it was not fitted to.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls  # type: ignore[import-untyped]

from mlm_repro.experiments.files import Foreseen, Law, RungPlan
from mlm_repro.lineage.errors import BadInput

Floats = NDArray[np.float64]
Bounds = Sequence[tuple[float, float]]

DRAWS = 400
FROM_SHARE = 0.5
"""The fit takes the losses after this share of a training."""
FEWEST = 3
"""Least number of different rungs in a fit."""
EXPONENTS, INTERACTION = (0.02, 1.0), (-1.0, 1.0)
"""Bounds of α and β, for which published values are 0.05 to 0.5, and of γ."""
LEAST_FACTOR = 1e-9
"""Factor of a term that a fit leaves out."""


class FittedLaw:
    """The law through the validation losses of some rungs."""

    def __init__(
        self, rungs: Sequence[RungPlan], curves: Mapping[int, Sequence[Mapping[int, float]]]
    ) -> None:
        """`curves` has losses by tokens for each seed of a rung. Raises BadInput for fewer than
        three rungs."""
        if len(curves) < FEWEST:
            raise BadInput(
                f"a law needs {FEWEST} rungs below the largest; {len(curves)} came to an end"
            )
        places = sorted(
            set.intersection(*(set(curve) for seeds in curves.values() for curve in seeds))
        )
        late = [place for place in places if place >= FROM_SHARE * places[-1]]
        self.parameters = np.array([rungs[rung].parameters for rung in curves], float)
        self.tokens = np.array(late, float)
        self.middle = float(np.exp(np.log(self.parameters).mean()))
        self.curves = [
            np.array([[curve[place] for place in late] for curve in seeds])
            for seeds in curves.values()
        ]
        means = np.stack([seeds.mean(axis=0) for seeds in self.curves])
        fitted = range(len(self.curves))
        self.law = self._fit(fitted, means)
        self.misfits = np.array([self._error(rung, means, self.law) for rung in fitted])
        self.left_out_errors = self.misfits
        if len(fitted) > FEWEST:
            others = [[rung for rung in fitted if rung != out] for out in fitted]
            laws = [self._fit(rest, means[rest], self.law) for rest in others]
            self.left_out_errors = np.array(
                [self._error(out, means, law) for out, law in enumerate(laws)]
            )

    def forecast(self, parameters: int) -> list[Foreseen]:
        """The curve of a model of this size with its 90 % intervals."""
        noise = np.random.default_rng(0)
        spreads = [_spread(seeds) for seeds in self.curves]
        misfit = float(np.sqrt(np.mean(self.left_out_errors**2)))
        ends: list[Floats] = []
        while len(ends) < DRAWS:
            drawn = noise.integers(len(self.curves), size=len(self.curves)).tolist()
            if len(set(drawn)) < FEWEST:
                continue
            seeds = [
                self.curves[r][noise.integers(len(self.curves[r]), size=len(self.curves[r]))]
                for r in drawn
            ]
            spread = spreads[int(noise.integers(len(spreads)))]
            share = 1 + spread[int(noise.integers(len(spread)))] + noise.normal(0.0, misfit)
            law = self._fit(drawn, np.stack([each.mean(axis=0) for each in seeds]), self.law)
            ends.append(np.array([law.loss(parameters, tokens) for tokens in self.tokens]) * share)
        low, high = np.quantile(np.stack(ends), (0.05, 0.95), axis=0).tolist()
        return [
            Foreseen(
                tokens=int(tokens), loss=self.law.loss(parameters, tokens), low=below, high=above
            )
            for tokens, below, above in zip(self.tokens, low, high, strict=True)
        ]

    def _error(self, rung: int, means: Floats, law: Law) -> float:
        """Share by which a law misses a rung's mean loss at the end."""
        return float(law.loss(self.parameters[rung], self.tokens[-1]) / means[rung, -1] - 1)

    def _fit(self, rungs: Sequence[int], losses: Floats, start: Law | None = None) -> Law:
        """The law through the losses [rung, place] of some rungs; a rung may occur several
        times."""
        sizes = np.log(self.parameters[list(rungs)] / self.middle)[:, None]
        lengths = np.log(self.tokens / self.tokens[-1])

        def terms(exponents: Floats) -> Floats:
            alpha, gamma, beta = exponents
            by = np.broadcast_arrays(
                1.0, np.exp(-alpha * sizes), np.exp(gamma * sizes - beta * lengths)
            )
            return np.stack([(each / losses).ravel() for each in by], axis=1)

        starts: Sequence[Sequence[float]] = [(0.1, 0.0, 0.1), (0.4, 0.0, 0.4)]
        if start:
            starts = [(start.size_exponent, start.interaction, start.data_exponent)]
        exponents, factors, _ = fit_powers(
            terms, np.ones(losses.size), starts, (EXPONENTS, INTERACTION, EXPONENTS)
        )
        irreducible, by_size, by_data = factors.tolist()
        size_exponent, interaction, data_exponent = exponents.tolist()
        return Law(
            irreducible=irreducible,
            by_size=max(by_size, LEAST_FACTOR),
            parameters=self.middle,
            size_exponent=size_exponent,
            by_data=max(by_data, LEAST_FACTOR),
            interaction=interaction,
            tokens=self.tokens[-1],
            data_exponent=data_exponent,
        )


def fit_powers(
    terms: Callable[[Floats], Floats],
    values: Floats,
    starts: Sequence[Sequence[float]],
    bounds: Bounds,
) -> tuple[Floats, Floats, Floats]:
    """Exponents, non-negative factors and residuals of the least-squares fit of terms(exponents) ·
    factors to values.

    The factors are linear, so only the exponents are searched, from each of the starts.
    """

    def solve(exponents: Floats) -> tuple[Floats, Floats]:
        columns = terms(exponents)
        factors = nnls(columns, values)[0]
        return factors, columns @ factors - values

    low, high = np.transpose(bounds)
    fits = [
        least_squares(
            lambda at: solve(at)[1], np.clip(start, low + 1e-9, high - 1e-9), bounds=(low, high)
        )
        for start in starts
    ]
    best = min(fits, key=lambda fit: fit.cost).x
    return best, *solve(best)


def _spread(seeds: Floats) -> Floats:
    """Relative deviations of losses [seed, ...] from the mean over seeds, times √(n / (n - 1)) for
    small n."""
    return np.asarray(
        math.sqrt(len(seeds) / max(len(seeds) - 1, 1)) * (seeds / seeds.mean(axis=0) - 1)
    )
