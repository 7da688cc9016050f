"""The law of a ladder's losses, and the forecast of its largest rung from the others. Imports no torch.

loss(N, D) = E + A / N^α + B · N^γ / D^β is fitted to the means over seeds of the validation losses in the last half of
each training, by least squares of relative differences. N counts the embeddings, as the published curve's sizes do.
With γ = 0 it is Equation 2 of Hoffmann et al. (2022), arXiv 2203.15556; that what a longer training gains depends on
the size is from Li et al. (2025), arXiv 2506.10972. The interval comes of a bootstrap that draws rungs and the seeds of
each, with what one training's seed adds and the errors that the law makes for rungs which it was not fitted to.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

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
SCALES = (-15.0, 5.0)
"""Between which the logarithms of both factors are looked for."""
STEPS = 400
"""At most, from a start."""
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
        (self.law,) = self._fit([every], means[None], None)
        self.misfits = self._errors(every, means, self.law)
        left = [[rung for rung in every if rung != out] for out in every if len(every) > FEWEST]
        laws = self._fit(left, means[np.array(left)], self.law) if left else []
        errors = [self._errors([out], means, law) for out, law in zip(every, laws, strict=False)]
        self.left_out_errors = np.concatenate(errors or [self.misfits])

    def forecast(self, parameters: int) -> tuple[list[Foreseen], tuple[float, float]]:
        """The curve of a model of so many parameters with its intervals, and the size exponent's interval."""
        noise = np.random.default_rng(0)
        spreads = [_spread(seeds) for seeds in self.curves]
        misfit = float(np.sqrt(np.mean(self.left_out_errors**2)))
        rungs: list[list[int]] = []
        means: list[Floats] = []
        shares: list[Floats] = []
        while len(rungs) < DRAWS:
            drawn = noise.integers(len(self.curves), size=len(self.curves)).tolist()
            if len(set(drawn)) < FEWEST:
                continue
            rungs.append(drawn)
            seeds = [self.curves[r][noise.integers(len(self.curves[r]), size=len(self.curves[r]))] for r in drawn]
            means.append(np.stack([each.mean(axis=0) for each in seeds]))
            of = int(noise.integers(len(spreads)))
            own = spreads[of][int(noise.integers(len(spreads[of])))]
            shares.append(1 + own + noise.normal(0.0, misfit))
        laws = self._fit(rungs, np.stack(means), self.law)
        ends = [
            [law.loss(parameters, tokens) for tokens in self.tokens] * share
            for law, share in zip(laws, shares, strict=True)
        ]
        low, high = np.quantile(np.stack(ends), (0.05, 0.95), axis=0)
        curve = [
            Foreseen(tokens=int(tokens), loss=self.law.loss(parameters, tokens), low=float(below), high=float(above))
            for tokens, below, above in zip(self.tokens, low, high, strict=True)
        ]
        below, above = np.quantile([law.size_exponent for law in laws], (0.05, 0.95))
        return curve, (float(below), float(above))

    def _errors(self, rungs: Sequence[int], means: Floats, law: Law) -> Floats:
        """Shares by which a law misses some rungs' mean losses [rung, place] at the end."""
        by_law = np.array([law.loss(self.parameters[rung], self.tokens[-1]) for rung in rungs])
        return np.asarray(by_law / means[list(rungs), -1] - 1)

    def _fit(self, rungs: Sequence[Sequence[int]], losses: Floats, start: Law | None) -> list[Law]:
        """The laws through losses [draw, rung, place] of some rungs each, the same rung perhaps several times."""
        sizes = np.log(self.parameters[np.array(rungs)] / self.middle)[..., None]
        lengths = np.log(self.tokens / self.tokens[-1])
        least = losses.min(axis=(1, 2))

        def misses(values: Floats) -> tuple[Floats, Floats]:
            irreducible, by_size, size_exponent, by_data, interaction, data_exponent = values.T[..., None, None]
            of_size = np.exp(by_size - size_exponent * sizes)
            of_data = np.exp(by_data + interaction * sizes - data_exponent * lengths)
            by = (np.ones(1), of_size, -sizes * of_size, of_data, sizes * of_data, -lengths * of_data)
            slopes = np.stack([each / losses for each in by], axis=-1).reshape(len(losses), -1, len(by))
            return ((irreducible + of_size + of_data) / losses - 1).reshape(len(losses), -1), slopes

        def of_law(law: Law) -> list[float | Floats]:
            by_size, by_data = math.log(law.by_size), math.log(law.by_data)
            return [law.irreducible, by_size, law.size_exponent, by_data, law.interaction, law.data_exponent]

        def first_guess(share: float, exponent: float) -> list[float | Floats]:
            half = np.log(0.5 * (1 - share) * least)
            return [share * least, half, exponent, half, 0.0, exponent]

        starts = [of_law(start)] if start else [first_guess(s, e) for s in (0.1, 0.4, 0.7) for e in (0.1, 0.4)]
        bounds = ((0.0, least), SCALES, EXPONENTS, SCALES, INTERACTION, EXPONENTS)
        return [
            Law(
                irreducible=irreducible,
                by_size=math.exp(by_size),
                parameters=self.middle,
                size_exponent=size_exponent,
                by_data=math.exp(by_data),
                interaction=interaction,
                tokens=self.tokens[-1],
                data_exponent=data_exponent,
            )
            for irreducible, by_size, size_exponent, by_data, interaction, data_exponent in _least_squares(
                misses, starts, bounds, len(losses)
            ).tolist()
        ]


def size_exponent(parameters: Sequence[int], ends: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """α of loss = E + A/N^α through the mean losses at the end of each size's seeds, with a 90 % interval.

    The interval comes of draws of how far the seeds of all sizes lie from their size's mean.
    """
    sizes = np.log(np.array(parameters, float) / max(parameters))
    noise, means = np.random.default_rng(0), np.array([np.mean(seeds) for seeds in ends])
    spread = np.concatenate([_spread(np.array(seeds)) for seeds in ends if len(seeds) > 1] or [np.zeros(1)])
    draws = [[1 + noise.choice(spread, len(seeds)).mean() for seeds in ends] for _ in range(DRAWS)]
    losses = means * np.array([[1.0] * len(ends), *draws])
    least = losses.min(axis=1)

    def misses(values: Floats) -> tuple[Floats, Floats]:
        irreducible, by_size, exponent = values.T[..., None]
        of_size = np.exp(by_size - exponent * sizes)
        slopes = np.stack([each / losses for each in (np.ones(1), of_size, -sizes * of_size)], axis=-1)
        return (irreducible + of_size) / losses - 1, slopes

    starts = [[share * least, np.log((1 - share) * least), exponent] for share in (0.2, 0.7) for exponent in (0.1, 0.4)]
    value, *drawn = _least_squares(misses, starts, ((0.0, least), SCALES, EXPONENTS), len(losses))[:, 2]
    low, high = np.quantile(drawn, (0.05, 0.95))
    return float(value), float(low), float(high)


def _least_squares(
    misses: Callable[[Floats], tuple[Floats, Floats]],
    starts: Sequence[Sequence[float | Floats]],
    bounds: Sequence[tuple[float, float | Floats]],
    count: int,
) -> Floats:
    """Values [problem, value] of `count` problems at once, each of the start from which its sum of squares is least.

    `misses` of values gives residuals [problem, n] and their slopes [problem, n, value]. A start and the bounds are of
    each value one number, or one for each problem. By Levenberg (1944) and Marquardt (1963); a value at a bound that
    its slope pushes outwards stays there.
    """

    def of_all(numbers: Iterable[float | Floats]) -> Floats:
        return np.stack([np.broadcast_to(each, count) for each in numbers], axis=1)

    low, high = map(of_all, zip(*bounds, strict=True))
    found, least = low, np.full(count, np.inf)
    for start in starts:
        values = np.clip(of_all(start), low, high)
        residuals, slopes = misses(values)
        damping = np.full(count, 1e-3)
        for _ in range(STEPS):
            gradient = (residuals[:, None] @ slopes)[:, 0]
            free = np.where(gradient > 0, values > low, values < high)
            curvature = slopes.swapaxes(1, 2) @ slopes * (free[:, None] & free[:, :, None])
            diagonal = np.diagonal(curvature, axis1=1, axis2=2) * damping[:, None] + np.where(free, 1e-15, 1.0)
            curvature += diagonal[..., None] * np.eye(diagonal.shape[1])
            tried = np.clip(values - np.linalg.solve(curvature, (gradient * free)[..., None])[..., 0], low, high)
            tried_residuals, tried_slopes = misses(tried)
            gain = (residuals**2).sum(axis=1) - (tried_residuals**2).sum(axis=1)
            better = gain > 0
            values = np.where(better[:, None], tried, values)
            residuals = np.where(better[:, None], tried_residuals, residuals)
            slopes = np.where(better[:, None, None], tried_slopes, slopes)
            damping = np.clip(np.where(better, damping / 2, damping * 5), 1e-9, 1e9)
            if not (better & (gain > 1e-10 * (residuals**2).sum(axis=1))).any() and damping.min() >= 1e3:
                break
        cost = (residuals**2).sum(axis=1)
        found, least = np.where((cost < least)[:, None], values, found), np.minimum(cost, least)
    return found


def _spread(seeds: Floats) -> Floats:
    """Shares by which losses of seeds [seed, ...] lie from their mean, widened as so few seeds lie too near it."""
    return np.asarray(math.sqrt(len(seeds) / max(len(seeds) - 1, 1)) * (seeds / seeds.mean(axis=0) - 1))


def fit(rungs: Sequence[RungPlan], curves: Mapping[int, Sequence[Mapping[int, float]]]) -> Fitted:
    """The law through validation losses by tokens, of each rung a curve for each seed."""
    places = sorted(set.intersection(*(set(curve) for seeds in curves.values() for curve in seeds)))
    of = [[[curve[place] for place in places] for curve in seeds] for seeds in curves.values()]
    return Fitted([rungs[rung].parameters for rung in curves], places, of)
