"""The law of a ladder's losses, and the forecast of its largest rung from the others. Imports no torch.

loss(N, D) = E + (A / N)^α + (B / D)^β, as in Hoffmann et al. (2022), arXiv 2203.15556, Equation 2, where N counts the
embeddings as the published curve's sizes do, is fitted to the means over seeds of the validation losses in the last
half of each training, by least squares of relative differences. The interval comes of a bootstrap that draws rungs and
the seeds of each, with what one training's seed and the law's own misfit add.
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
    "loss = E + (A/N)^α + (B/D)^β by least squares of relative differences on the means over seeds, from half of "
    "the training on; interval: 5 % to 95 % of 400 draws of rungs and seeds, with a seed's and the law's own spread"
)
DRAWS = 400
FROM_SHARE = 0.5
"""Of a training, from which on its losses are fitted."""
EXPONENTS = (0.02, 1.0)
"""Between which both exponents are looked for; published ones are 0.05 to 0.5."""
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
        self.law = self._fit(range(len(self.curves)), means, None)
        fitted = np.array([self.law.loss(size, self.tokens[-1]) for size in self.parameters])
        self.misfits: Floats = fitted / means[:, -1] - 1

    def forecast(self, parameters: int) -> tuple[list[Foreseen], tuple[float, float]]:
        """The curve of a model of so many parameters with its intervals, and the size exponent's interval."""
        noise = np.random.default_rng(0)
        spreads = [seeds / seeds.mean(axis=0) - 1 for seeds in self.curves]
        scale = [math.sqrt(len(seeds) / max(len(seeds) - 1, 1)) for seeds in self.curves]
        misfit = float(np.sqrt(np.mean(self.misfits**2)))
        drawn: list[Floats] = []
        exponents: list[float] = []
        while len(drawn) < DRAWS:
            rungs = noise.integers(len(self.curves), size=len(self.curves))
            if len(set(rungs.tolist())) < FEWEST:
                continue
            means = [self.curves[r][noise.integers(len(self.curves[r]), size=len(self.curves[r]))] for r in rungs]
            law = self._fit(rungs.tolist(), np.stack([mean.mean(axis=0) for mean in means]), self.law)
            of = int(noise.integers(len(spreads)))
            own = scale[of] * spreads[of][int(noise.integers(len(spreads[of])))]
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

    def _fit(self, rungs: Sequence[int], losses: Floats, start: Law | None) -> Law:
        """The law through losses [rung, place] of some rungs, the same rung perhaps several times."""
        sizes = self.parameters[list(rungs)]
        least = float(losses.min())

        def predicted(values: Floats) -> Floats:
            irreducible, by_size, size_exponent, by_data, data_exponent = values
            of_size = np.exp(by_size - size_exponent * np.log(sizes / self.middle))
            of_data = np.exp(by_data - data_exponent * np.log(self.tokens / self.tokens[-1]))
            return np.asarray(irreducible + of_size[:, None] + of_data[None, :])

        def of_law(law: Law) -> list[float]:
            by_size, by_data = math.log(law.by_size), math.log(law.by_data)
            return [law.irreducible, by_size, law.size_exponent, by_data, law.data_exponent]

        starts = [of_law(start)] if start else [
            [share * least, *2 * [math.log(0.5 * (1 - share) * least), exponent]]
            for share in (0.1, 0.4, 0.7) for exponent in (0.1, 0.4)
        ]  # fmt: skip
        bounds = ([0.0, -15.0, EXPONENTS[0], -15.0, EXPONENTS[0]], [least, 5.0, EXPONENTS[1], 5.0, EXPONENTS[1]])
        fits = [
            least_squares(
                lambda values: (predicted(values) / losses - 1).ravel(), np.clip(each, *bounds), bounds=bounds
            )
            for each in starts
        ]
        irreducible, by_size, size_exponent, by_data, data_exponent = min(fits, key=lambda fit: fit.cost).x
        return Law(
            irreducible=irreducible,
            by_size=math.exp(by_size),
            parameters=self.middle,
            size_exponent=size_exponent,
            by_data=math.exp(by_data),
            tokens=self.tokens[-1],
            data_exponent=data_exponent,
        )


def fit(rungs: Sequence[RungPlan], curves: Mapping[int, Sequence[Mapping[int, float]]]) -> Fitted:
    """The law through validation losses by tokens, of each rung a curve for each seed."""
    places = sorted(set.intersection(*(set(curve) for seeds in curves.values() for curve in seeds)))
    of = [[[curve[place] for place in places] for curve in seeds] for seeds in curves.values()]
    return Fitted([rungs[rung].parameters for rung in curves], places, of)
