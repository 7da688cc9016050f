"""How far rounding moves the results of a kernel that is right, so that a wrong one can be told
from it.

Each kernel is written once more below, forward and backward, as a formula in float64 in which every
operation is off by an error drawn at random (Monte Carlo arithmetic: Parker 1997, UCLA CSD-970002).
Many draws show the standard deviation of each element's error, whatever the processor:

- an operation is off by at most half a unit in the last place of its result (Higham 2002, "Accuracy
  and Stability of Numerical Algorithms", section 2.2), an exponential by at most twice that;
- a sum of n terms is off by the errors of its n − 1 partial sums (section 4.2), here those of a
  random order: sums in blocks and trees have smaller ones;
- errors are independent with mean zero, so that they add up as √n and not as n (Higham & Mary 2019,
  "A New Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41). Many of them
  together have a normal distribution, few have shorter tails.

Tensors have a first dim for the draws, of size 1 where there is no error yet. Shapes otherwise as
in `engine/kernels`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from scipy import stats

from mlm_repro.engine.rng import DropoutMask

DRAWS = 32
NEAR, FAR = 4.0, 12.0
"""Standard deviations that few errors reach and that none does: beyond is a share of 0.00035 and of
2·10⁻¹³.

An error in standard deviations of so many draws has Student's t distribution.
"""
TOGETHER = 4
"""Errors that may go together, as those of a row that is divided by its sum."""
FALSE_ALARM = 1e-9
"""Probability that chance alone takes more of many errors beyond NEAR than is allowed."""
MEAN_SQUARE = 1 / (8 * math.log(2))
"""Of an error in rounding, in units of round-off times the number: the first digits of numbers
follow Benford's law."""

Tensors = Sequence[torch.Tensor]
Model = Callable[["Rounding", Tensors, tuple[Any, ...], torch.Tensor], Tensors]
"""Output and gradients, [draws, …], from inputs, other arguments and the gradient of the output."""


def deviations(found: torch.Tensor, exact: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Errors in standard deviations of the draws; 0 where there is no error."""
    error = (found.double() - exact).abs()
    return torch.where(error == 0, 0.0, error / (draws - exact).square().mean(0).sqrt())


def is_rounding(errors: torch.Tensor) -> bool:
    """Whether of errors, in standard deviations, none is beyond FAR and no more than by chance are
    beyond NEAR."""
    expected = 2 * stats.t.sf(NEAR, DRAWS) * errors.numel()
    most = TOGETHER * stats.poisson.isf(FALSE_ALARM, expected / TOGETHER)
    return bool(errors.max() < FAR and (errors > NEAR).sum() <= most)


class Rounding:
    """Errors of fp32 arithmetic on tensors of a dtype; none at all in float64."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._random = torch.Generator().manual_seed(7)

    def work(self, exact: torch.Tensor) -> torch.Tensor:
        """The result of one operation in fp32."""
        return self._moved(exact, torch.float32)

    def stored(self, exact: torch.Tensor) -> torch.Tensor:
        """What may be kept in the dtype of the tensors."""
        return self._moved(exact, self._dtype)

    def constant(self, value: float) -> torch.Tensor:
        """A number that fp32 may not hold exactly, [draws]: all elements share its error."""
        number = torch.full((1,), value, dtype=torch.float64)
        return number if number == number.float() else self.work(number)

    def exponential(self, x: torch.Tensor) -> torch.Tensor:
        """e to the power of x."""
        return self.work(self.work(x.exp()))

    def sum(self, terms: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Of one dim, which stays with size 1."""
        count = (terms != 0).sum(dim, keepdim=True)
        return self._added(
            terms.sum(dim, keepdim=True), terms.square().sum(dim, keepdim=True), count
        )

    def product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Of matrices."""
        squares = a.square() @ b.square()
        count = (a != 0).double() @ (b != 0).double()
        return self._added(a @ b, squares, count, squares)

    def _moved(self, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self._dtype == torch.float64:
            return exact
        # Of two, at or below the number.
        power = (exact.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
        last_place = power.clamp_(min=torch.finfo(dtype).smallest_normal).mul_(
            torch.finfo(dtype).eps
        )
        return exact + self._uniform(exact).mul_(last_place)

    def _added(
        self,
        exact: torch.Tensor,
        squares: torch.Tensor,
        count: torch.Tensor,
        products: torch.Tensor | float = 0.0,
    ) -> torch.Tensor:
        """A sum of so many terms: the squares of its partial sums but the first, averaged over all
        orders."""
        if self._dtype == torch.float64:
            return exact
        partial = (
            (count + 1) / 6 * squares
            + (count + 1) / 3 * exact.square()
            - squares / count.clamp(min=1)
        )
        unit = torch.finfo(torch.float32).eps / 2
        deviation = (MEAN_SQUARE * (partial + products).clamp_(min=0)).sqrt_() * unit
        return exact + self._uniform(exact).mul_(deviation * math.sqrt(12))

    def _uniform(self, like: torch.Tensor) -> torch.Tensor:
        """Errors between −1/2 and 1/2."""
        return torch.rand(DRAWS, *like.shape[1:], generator=self._random, dtype=torch.float64).sub_(
            0.5
        )


def attention(
    r: Rounding, tensors: Tensors, others: tuple[Any, ...], upstream: torch.Tensor
) -> Tensors:
    (qkv,), (mask,) = tensors, others
    s, b, n, _, d = qkv.shape
    query, key, value = qkv[None].permute(4, 0, 2, 3, 1, 5)  # each [draws, b, n, s, d]
    given = upstream.view(1, s, b, n, d).permute(0, 2, 3, 1, 4)
    seen = torch.ones(s, s, dtype=torch.bool).tril()
    kept, factor = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    if mask is not None:
        kept, factor = (
            mask.keep(n * s, s, qkv.device).view(b, n, s, s).double(),
            r.constant(mask.scale),
        )
    scale, factor = (each.view(-1, 1, 1, 1, 1) for each in (r.constant(1 / math.sqrt(d)), factor))

    scores = r.work(r.stored(r.product(query, key.mT)) * scale)
    top = scores.masked_fill(~seen, -math.inf).amax(-1, keepdim=True)
    odds = r.exponential(r.work(scores - top)) * seen
    total = r.sum(odds)
    context = r.stored(r.stored(r.product(r.stored(odds * kept), value)) * r.work(factor / total))

    log_sum = r.work(top + r.work(total.log()))
    weights = r.exponential(r.work(scores - log_sum)) * seen
    inner = r.sum(r.work(given * context))
    slopes = r.work(r.stored(r.product(given, value.mT)) * kept * factor) - inner
    slopes = r.stored(r.work(weights * r.work(slopes)) * scale)
    to_query, to_key = r.product(slopes, key), r.product(slopes.mT, query)
    to_value = r.product(r.stored(weights * kept * factor).mT, given)
    found = torch.stack(
        [r.stored(each) for each in (to_query, to_key, to_value)], dim=4
    )  # [draws, b, n, s, 3, d]
    return context.permute(0, 3, 1, 2, 4).flatten(3), found.permute(0, 3, 1, 2, 4, 5)


def linear_cross_entropy(
    r: Rounding, tensors: Tensors, others: tuple[Any, ...], upstream: torch.Tensor
) -> Tensors:
    (hidden, weight), (targets, vocab_size, _) = tensors, others
    rows, own = hidden[None], torch.nn.functional.one_hot(targets, vocab_size).double()
    logits = r.stored(r.product(rows, weight[None, :vocab_size].mT))  # [draws, n, vocab_size]
    top = logits.amax(-1, keepdim=True)
    odds = r.exponential(r.work(logits - top))
    total = r.sum(odds)
    losses = r.work(r.work(r.work(total.log()) + top) - (logits * own).sum(-1, keepdim=True))
    stored = 2.0**15  # fp16 has no smaller numbers than 2⁻²⁴
    slopes = (
        r.stored(r.work(odds * r.work(stored / len(hidden) / total)) - own * stored / len(hidden))
        / stored
    )
    to_hidden = r.stored(r.product(slopes, weight[None, :vocab_size]))
    to_weight = r.stored(r.stored(r.product(slopes.mT, rows)))  # the parts, and their sum
    to_weight = torch.nn.functional.pad(to_weight, (0, 0, 0, len(weight) - vocab_size))
    return (
        r.work(losses.mean((1, 2))),
        r.stored(to_hidden * upstream),
        r.stored(to_weight * upstream),
    )


def masked_softmax(
    r: Rounding, tensors: Tensors, others: tuple[Any, ...], upstream: torch.Tensor
) -> Tensors:
    (scores,), (scale, visible) = tensors, others
    s, k = scores.shape[-2:]
    seen = torch.ones(s, k, dtype=torch.bool).tril(k - s) if visible is None else visible
    scores = r.stored(scores[None] * r.constant(scale).view(-1, 1, 1, 1, 1))
    top = scores.masked_fill(~seen, -math.inf).amax(-1, keepdim=True)
    odds = r.exponential(r.work(scores - top)) * seen
    weights = r.work(odds / r.sum(odds))
    inner = r.sum(r.work(weights * upstream))
    slopes = r.stored(r.work(weights * r.work(upstream - inner)))
    return r.stored(weights), r.stored(slopes * scale)


def dropout(
    r: Rounding, tensors: Tensors, others: tuple[Any, ...], upstream: torch.Tensor
) -> Tensors:
    (x,), (mask,) = tensors, others
    factors = _factors(r, x, mask)
    return r.stored(x * factors), r.stored(upstream * factors)


def bias_dropout_add(
    r: Rounding, tensors: Tensors, others: tuple[Any, ...], upstream: torch.Tensor
) -> Tensors:
    (x, bias, residual), (mask,) = tensors, others
    factors = _factors(r, x, mask)
    if mask is None:
        found = r.stored(r.sum(torch.stack([x, bias.expand_as(x), residual])[None], 1).squeeze(1))
    else:
        found = r.stored(r.work(r.work(x[None] + bias) * factors) + residual)
    to_x = r.work(upstream[None] * factors)
    return found, r.stored(to_x), _summed(r, to_x), upstream[None]


def _factors(r: Rounding, x: torch.Tensor, mask: DropoutMask | None) -> torch.Tensor:
    """What each element is multiplied with, [draws, s, b, h]."""
    if mask is None:
        return torch.ones_like(x)[None]
    return mask.keep(x.size(0), x.size(2), x.device).transpose(0, 1) * r.constant(mask.scale).view(
        -1, 1, 1, 1
    )


def _summed(r: Rounding, each: torch.Tensor) -> torch.Tensor:
    """The gradient of what is added to every row, [draws, h]."""
    return r.stored(r.sum(each.flatten(1, -2), 1)).squeeze(1)


def bias_gelu(
    r: Rounding, tensors: Tensors, others: tuple[Any, ...], upstream: torch.Tensor
) -> Tensors:
    x, bias = tensors
    slope, cubic = (
        r.constant(each).view(-1, 1, 1, 1) for each in (2 * math.sqrt(2 / math.pi), 0.044715)
    )
    value = r.work(x[None] + bias)
    square = r.work(value * value)
    odds = r.exponential(-r.work(slope * r.work(value + r.work(r.work(cubic * value) * square))))
    share = r.work(1 / r.work(1 + odds))
    inner = r.work(slope * r.work(1 + r.work(3 * cubic * square)))
    steep = r.work(r.work(r.work(r.work(value * share) * share) * odds) * inner)
    to_x = r.work(upstream * r.work(share + steep))
    return r.stored(value * share), r.stored(to_x), _summed(r, to_x)


MODELS: dict[str, Model] = {
    "attention": attention,
    "linear_cross_entropy": linear_cross_entropy,
    "masked_softmax": masked_softmax,
    "dropout": dropout,
    "bias_dropout_add": bias_dropout_add,
    "bias_gelu": bias_gelu,
}
"""By the kernel's name."""
