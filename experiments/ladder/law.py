"""The law of a ladder's losses, and the forecast of its largest rung from the others. Imports no torch.

loss(N, D) = E + A / N^α + B · N^γ / D^β is fitted to the means over seeds of the validation losses in the last half of
each training, by least squares of relative differences. N counts the embeddings, as the published curve's sizes do.
With γ = 0 it is Equation 2 of Hoffmann et al. (2022), arXiv 2203.15556; that what a longer training gains depends on
the size is from Li et al. (2025), arXiv 2506.10972. The interval comes of a bootstrap that draws rungs and the seeds of
each, with what one training's seed adds and the errors that the law makes for rungs which it was not fitted to.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares  # type: ignore[import-untyped]

from lineage.errors import BadInput
from lineage.ladder import Foreseen, Law, RungPlan

Floats = NDArray[np.float64]

METHOD = (
    "loss = E + A/N^α + B·N^γ/D^β by least squares of relative differences on the means over seeds, from half of the "
    "training on; interval: 5 % to 95 % of 400 draws of rungs and seeds, with a seed's spread and that of the law's "
    "errors for rungs left out of it"
)
DRAWS = 400
FROM_SHARE = 0.5
"""Of a training, from which on its losses are fitted."""
EXPONENTS = (0.02, 1.0)
"""Between which both exponents are looked for; published ones are 0.05 to 0.5."""
INTERACTION = (-1.0, 1.0)
FEWEST = 3
"""Different rungs in a draw."""


class Fitted:
    """Curves [rung, seed, place] at the same places of training, and the law through them."""

    def __init__(self, parameters: Sequence[int], tokens: Sequence[int], curves: Sequence[Sequence[Sequence[float]]]):
        """`curves` are of each rung a list of seeds, each with a loss for each of `tokens`.

        Raises BadInput for fewer than three rungs.
        """
        if len(curves) < FEWEST:
            raise BadInput(f"a law needs {FEWEST} rungs below the largest; {len(curves)} came to an end")
        shown = np.array(tokens, float) >= FROM_SHARE * tokens[-1]
        self.parameters, self.tokens = np.array(parameters, float), np.array(tokens, float)[shown]
        self.middle = float(np.exp(np.log(self.parameters).mean()))
        self.curves = [np.array(seeds, float)[:, shown] for seeds in curves]
        means = np.stack([seeds.mean(axis=0) for seeds in self.curves])
        every = list(range(len(self.curves)))
        self.law = self._fit(every, means, None)
        self.misfits = self._errors(every, means, self.law)
        self.left_out_errors = np.concatenate([
            self._errors([out], means, self._fit(others, means[others], self.law))
            for out in every if len(others := [rung for rung in every if rung != out]) >= FEWEST
        ] or [self.misfits])  # fmt: skip

    def forecast(self, parameters: int) -> tuple[list[Foreseen], tuple[float, float]]:
        """The curve of a model of so many parameters with its intervals, and the size exponent's interval."""
        noise = np.random.default_rng(0)
        spreads = [_spread(seeds) for seeds in self.curves]
        misfit = float(np.sqrt(np.mean(self.left_out_errors**2)))
        drawn: list[Floats] = []
        exponents: list[float] = []
        while len(drawn) < DRAWS:
            rungs = noise.integers(len(self.curves), size=len(self.curves))
            if len(set(rungs.tolist())) < FEWEST:
                continue
            means = [self.curves[r][noise.integers(len(self.curves[r]), size=len(self.curves[r]))] for r in rungs]
            law = self._fit(rungs.tolist(), np.stack([mean.mean(axis=0) for mean in means]), self.law)
            of = int(noise.integers(len(spreads)))
            own = spreads[of][int(noise.integers(len(spreads[of])))]
            losses = np.array([law.loss(parameters, tokens) for tokens in self.tokens])
            drawn.append(losses * (1 + own + noise.normal(0.0, misfit)))
            exponents.append(law.size_exponent)
        low, high = np.quantile(np.stack(drawn), (0.05, 0.95), axis=0)
        curve = [
            Foreseen(tokens=int(tokens), loss=self.law.loss(parameters, tokens), low=float(below), high=float(above))
            for tokens, below, above in zip(self.tokens, low, high, strict=True)
        ]
        below, above = np.quantile(exponents, (0.05, 0.95))
        return curve, (float(below), float(above))

    def _errors(self, rungs: Sequence[int], means: Floats, law: Law) -> Floats:
        """Shares by which a law misses some rungs' mean losses [rung, place] at the end."""
        by_law = np.array([law.loss(self.parameters[rung], self.tokens[-1]) for rung in rungs])
        return np.asarray(by_law / means[list(rungs), -1] - 1)

    def _fit(self, rungs: Sequence[int], losses: Floats, start: Law | None) -> Law:
        """The law through losses [rung, place] of some rungs, the same rung perhaps several times."""
        sizes = np.log(self.parameters[list(rungs), None] / self.middle)
        lengths = np.log(self.tokens / self.tokens[-1])
        least = float(losses.min())

        def parts(values: Floats) -> tuple[Floats, Floats]:
            _, by_size, size_exponent, by_data, interaction, data_exponent = values
            of_size = np.exp(by_size - size_exponent * sizes)
            return of_size, np.exp(by_data + interaction * sizes - data_exponent * lengths)

        def misses(values: Floats) -> Floats:
            of_size, of_data = parts(values)
            return np.asarray((values[0] + of_size + of_data) / losses - 1).ravel()

        def slopes(values: Floats) -> Floats:
            of_size, of_data = parts(values)
            by = (np.ones(1), of_size, -sizes * of_size, of_data, sizes * of_data, -lengths * of_data)
            return np.stack([np.asarray(each / losses).ravel() for each in by], axis=1)

        def of_law(law: Law) -> list[float]:
            by_size, by_data = math.log(law.by_size), math.log(law.by_data)
            return [law.irreducible, by_size, law.size_exponent, by_data, law.interaction, law.data_exponent]

        def first_guess(share: float, exponent: float) -> list[float]:
            half = math.log(0.5 * (1 - share) * least)
            return [share * least, half, exponent, half, 0.0, exponent]

        starts = [of_law(start)] if start else [first_guess(s, e) for s in (0.1, 0.4, 0.7) for e in (0.1, 0.4)]
        low, high = zip(
            (0.0, least), (-15.0, 5.0), EXPONENTS, (-15.0, 5.0), INTERACTION, EXPONENTS, strict=True
        )  # fmt: skip
        fits = [least_squares(misses, np.clip(each, low, high), slopes, (low, high), "dogbox") for each in starts]
        irreducible, by_size, size_exponent, by_data, interaction, data_exponent = min(fits, key=lambda fit: fit.cost).x
        return Law(
            irreducible=irreducible,
            by_size=math.exp(by_size),
            parameters=self.middle,
            size_exponent=size_exponent,
            by_data=math.exp(by_data),
            interaction=interaction,
            tokens=self.tokens[-1],
            data_exponent=data_exponent,
        )


def size_exponent(parameters: Sequence[int], ends: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """α of loss = E + A/N^α through the mean losses at the end of each size's seeds, with a 90 % interval.

    The interval comes of draws of how far the seeds of all sizes lie from their size's mean.
    """
    sizes = np.log(np.array(parameters, float) / max(parameters))

    def of(losses: Floats) -> float:
        def misses(values: Floats) -> Floats:
            irreducible, by_size, exponent = values
            return np.asarray((irreducible + np.exp(by_size - exponent * sizes)) / losses - 1)

        least = float(losses.min())
        starts = [
            (share * least, math.log((1 - share) * least), exponent) for share in (0.2, 0.7) for exponent in (0.1, 0.4)
        ]
        bounds = ((0.0, -15.0, EXPONENTS[0]), (least, 5.0, EXPONENTS[1]))
        fits = [least_squares(misses, start, bounds=bounds, method="dogbox") for start in starts]
        return float(min(fits, key=lambda fit: fit.cost).x[2])

    noise, means = np.random.default_rng(0), np.array([np.mean(seeds) for seeds in ends])
    spread = np.concatenate([_spread(np.array(seeds)) for seeds in ends if len(seeds) > 1] or [np.zeros(1)])
    draws = [of(means * [1 + noise.choice(spread, len(seeds)).mean() for seeds in ends]) for _ in range(DRAWS)]
    low, high = np.quantile(draws, (0.05, 0.95))
    return of(means), float(low), float(high)


def _spread(seeds: Floats) -> Floats:
    """Shares by which losses of seeds [seed, ...] lie from their mean, widened as so few seeds lie too near it."""
    return np.asarray(math.sqrt(len(seeds) / max(len(seeds) - 1, 1)) * (seeds / seeds.mean(axis=0) - 1))


def fit(rungs: Sequence[RungPlan], curves: Mapping[int, Sequence[Mapping[int, float]]]) -> Fitted:
    """The law through validation losses by tokens, of each rung a curve for each seed."""
    places = sorted(set.intersection(*(set(curve) for seeds in curves.values() for curve in seeds)))
    of = [[[curve[place] for place in places] for curve in seeds] for seeds in curves.values()]
    return Fitted([rungs[rung].parameters for rung in curves], places, of)
