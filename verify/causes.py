"""Group findings by their cause, with the ratio to the serial run and the likely kind of fault."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.linalg import lstsq, norm

from mlm_repro.engine.compare.tensors import Array, TensorPart, assemble
from mlm_repro.lineage.config import Config

CLOSE = 1e-3
"""Share of a gradient's norm by which it may miss an explanation that counts as right."""


class LayoutFinding(Config):
    """A number of one layout that is not as required, found by the check `probe`: a tensor differs
    from the serial run's, copies or dropout masks on its ranks do not agree, parts begin alike, or
    the gradient norm counts another number of elements. `value` is the number, `expected` the
    required one or the largest allowed, `parameter` the name of the parameter, tensor or module;
    `str` gives the finding as one line."""

    layout: str
    probe: str
    parameter: str
    value: float
    """Measured value: a number of elements, or the largest difference from the serial run or from
    another copy."""
    expected: float
    """Required number of elements, or the largest difference that rounding explains."""
    where: str = ""
    ratio: float | None = None
    """Factor by which the serial gradient comes nearest to the layout's."""
    kind: str = ""
    """Likely kind of fault in words, as the numbers suggest."""
    alike: tuple[str, ...] = ()
    """Names of other parameters with the same fault."""
    folded: tuple[str, ...] = ()
    """Sentences about further findings that follow from this one, or may follow."""

    def __str__(self) -> str:
        if self.probe == "dropout":
            text = f"{self.parameter}: {self.where}"
        elif self.probe == "initial shards":
            text = f"{self.parameter} begins with the same bits {self.where}"
        elif self.probe == "planted gradient":
            text = (
                f"{self.parameter} counts {self.value:.6g} elements, must be {self.expected:.6g}"
                f" {self.where}".strip()
            )
        else:
            size = "" if self.ratio is None else f"is {self.ratio:.3f} × serial and "
            differs = f"differs by {self.value:.2g}, may differ by {self.expected:.2g}"
            text = f"{self.parameter} {size}{differs} {self.where}".strip()
        text += f"; {self.kind}" if self.kind else ""
        text += f"; so {_listed(self.alike)}" if self.alike else ""
        more = f" [{len(self.folded)} more follow]" if self.folded else ""
        return f"{self.layout}: {self.probe}: {text}{more}"


def parameter_of(tensor: str) -> str:
    """Return the name of the parameter that a recorded tensor belongs to: the tensor's name without
    `updated `, `gradient of `, `exp_avg of ` or `exp_avg_sq of ` before it. Any other name is
    returned as it is."""
    return re.sub("^(updated|(gradient|exp_avg|exp_avg_sq) of) ", "", tensor)


def _any_layer(name: str) -> str:
    """Return a parameter's name with a star in place of each number between dots, such as a
    layer's."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _listed(names: Sequence[str]) -> str:
    """Return the parameters of the tensors that are called `names`, such as `gradient of NAME`, as
    one text with commas: the first four parameters' names, and how many more there are. Numbers of
    layers become stars, and a name that is then repeated counts once."""
    short = list(dict.fromkeys(_any_layer(parameter_of(name)) for name in names))
    return ", ".join(short[:4]) + (f" and {len(short) - 4} more" if len(short) > 4 else "")


def fold(
    findings: Sequence[LayoutFinding],
    backward: Sequence[str],
    serial: Mapping[str, Array],
    gradients: Sequence[Sequence[TensorPart]],
    shares: Mapping[str, Sequence[Array]],
    output: str = "",
) -> list[LayoutFinding]:
    """Return one finding for each cause, with the findings that follow from it folded into it:
    first initial copies, initial shards and dropout, then the forward pass or the gradients in
    order of `backward`, and last parameters that the norm does not count once. All other findings,
    such as of weights, moments and checkpoints, follow from the forward pass or the first gradient.
    If neither the forward pass nor a gradient differs, the first of these other findings is a cause
    without a `kind`, before the parameters that the norm does not count once; but if they are of
    the gradient norm alone, they follow from the first such parameter, if there is one.

    `backward` are parameters in the order in which a backward pass reaches them. `serial`,
    `gradients` and `shares` are of the first iteration: `serial` has the serial run's gradient by
    parameter, `gradients` the parts of gradients on each rank, `shares` by parameter the serial
    run's gradient as accumulated after each microbatch. `output` is a phrase, which begins with a
    comma, on the output that is the first to differ in a forward pass; empty if none is known.
    """
    by_probe = defaultdict(list)
    for finding in findings:
        by_probe[finding.probe].append(finding)
    one_cause = ("initial copies", "initial shards", "dropout")
    causes = list(filter(None, [_first(by_probe.pop(probe, [])) for probe in one_cause]))
    counted = defaultdict(list)
    for finding in by_probe.pop("planted gradient", []):
        counted[round(finding.value / max(finding.expected, 1), 3)].append(finding)
    norms = [
        _first(group, f"counted {ratio:g} times in the norm") for ratio, group in counted.items()
    ]
    losses = by_probe.pop("loss", [])
    wrong = by_probe.pop("gradient", [])
    copies = by_probe.pop("copies", [])
    later = list(chain.from_iterable(by_probe.values()))
    # A wrong forward pass makes every gradient wrong: whatever else was found follows from it.
    if losses:
        kind = f"the forward pass differs{output}"
        causes.append(_first(losses[:1], kind, [*losses[1:], *wrong, *copies, *later]))
    else:
        named: dict[str, LayoutFinding] = {}
        for finding in wrong + copies:
            name = finding.parameter.removeprefix("gradient of ")
            if name in serial:
                named.setdefault(name, finding)
        groups = list(
            _gradients(
                [name for name in backward if name in named], backward, serial, gradients, shares
            )
        )
        others = [finding for finding in wrong + copies if finding not in named.values()] + later
        for number, (alike, spread, ratio, kind) in enumerate(groups):
            rest = [named[name] for name in spread] + ([] if number else others)
            causes.append(_first([named[name] for name in alike], kind, rest, ratio))
        others.sort(key=lambda finding: finding.parameter == "gradient norm")
        if not groups and others and norms and others[0].parameter == "gradient norm":
            norms[0] = norms[0].model_copy(update={"folded": tuple(map(str, others))})
        elif not groups and others:
            causes.append(_first(others[:1], "", others[1:]))
    return causes + norms


SPREADS = "what comes before it in the model differs too"
VAGUE = ("off by", "not a multiple")
"""Beginnings of kinds that say how far a gradient is off, and not what was done to it."""


def _first(
    alike: Sequence[LayoutFinding],
    kind: str = "",
    folded: Sequence[LayoutFinding] = (),
    ratio: float | None = None,
) -> Any:
    """Return a copy of the first of `alike`, a list of findings of one fault, or None if the list
    is empty. The copy's fields `kind` and `ratio` are the arguments, its field `alike` has the
    names of the parameters of the other findings, and its field `folded` has the findings in the
    argument `folded`, which follow from this one, as sentences."""
    if not alike:
        return None
    return alike[0].model_copy(
        update={
            "kind": kind,
            "ratio": ratio,
            "alike": tuple(finding.parameter for finding in alike[1:]),
            "folded": tuple(map(str, folded)),
        }
    )


def _gradients(
    names: Sequence[str],
    backward: Sequence[str],
    serial: Mapping[str, Array],
    gradients: Sequence[Sequence[TensorPart]],
    shares: Mapping[str, Sequence[Array]],
) -> Iterator[tuple[list[str], list[str], float | None, str]]:
    """Yield (parameters, others, ratio, kind) for each group of gradients that are wrong in the
    same way: the parameters with these gradients; other parameters, whose gradients are taken to be
    wrong because they come after one of these in the backward pass; the ratio of the first
    parameter's gradient to the serial one; and the kind of fault in words. `names` are the
    parameters with a wrong gradient, `backward` all parameters, both in the order of the backward
    pass. By parameter, `serial` has the serial run's gradient and `shares` that gradient as
    accumulated after each microbatch; `gradients` has the parts of gradients on each rank. The
    ratio is None if the parts do not make the serial shape, a number is not finite or the serial
    gradient is 0."""
    if not names:
        return
    explained = {}
    for name in names:
        tensor = f"gradient of {name}"
        held = [[part for part in rank if part.tensor == tensor] for rank in gradients]
        explained[name] = explain(list(filter(None, held)), serial[name], shares.get(name, ()))
    clear = {
        _any_layer(name): kind
        for name, (_, kind) in reversed(explained.items())
        if not kind.startswith(VAGUE)
    }
    kinds: dict[str, list[str]] = defaultdict(list)
    spread = defaultdict(list)
    for name, (_, own) in explained.items():
        # The same parameter of another layer has the same fault, though it may be small there.
        kind = clear.get(_any_layer(name), own)
        # A gradient that is off in no clear way, behind a wrong one, follows from it.
        if kind.startswith(VAGUE) and kinds and kind not in kinds:
            spread[next(iter(kinds))].append(name)
        else:
            kinds[kind].append(name)
    reached = backward[backward.index(names[0]) :]
    # Most parameters behind the first one differ, in several ways: its wrong gradient has spread
    # through the backward pass.
    if len(kinds) > 1 and len(names) > 4 and len(names) >= 0.6 * len(reached):
        ratio, kind = explained[names[0]]
        yield list(names[:1]), list(names[1:]), ratio, f"{kind}; {SPREADS}"
        return
    for kind, alike in kinds.items():
        alike.sort(key=lambda name: explained[name][1] != kind)
        rest = spread[kind]
        said = f"{kind}; {SPREADS}" if rest else kind
        yield alike, rest, explained[alike[0]][0], said


def explain(
    ranks: Sequence[Sequence[TensorPart]], serial: Array, shares: Sequence[Array]
) -> tuple[float | None, str]:
    """Return the ratio of a gradient, given by its parts on each rank, to the serial gradient, and
    the likely kind of fault in words. The ratio is None if the parts make no whole of the serial
    gradient's shape, or a number in the whole is not finite, or the serial gradient is 0. `shares`
    are the serial run's gradient as accumulated after each microbatch; they may be empty."""
    try:
        whole = next(iter(assemble(chain.from_iterable(ranks)).values()))
    except Exception:
        return None, "the ranks' parts do not make a whole"
    if not serial.any():
        return None, "the serial gradient is 0"
    if whole.shape != serial.shape or not np.isfinite(whole).all():
        return None, "no such gradient in the serial run"
    ratio = ratio_of(whole, serial)
    # The explanations that say most come first; a later one may hold too.
    return ratio, (
        _of_copies(ranks, serial)
        or _of_multiple(whole, serial, ratio)
        or _of_microbatches(whole, shares)
        or _of_rows(whole, serial)
        or "not a multiple of the serial gradient"
    )


def ratio_of(value: Array, serial: Array) -> float:
    """Return the factor that brings the serial tensor nearest to `value`, the tensor that is
    compared with it, by least squares; 0 if the serial tensor is 0."""
    return float(np.vdot(serial, value)) / max(float(np.vdot(serial, serial)), math.ulp(0))


def is_near(value: Array, serial: Array) -> bool:
    """Return True if the norm of `value` - `serial`, two arrays of one shape, is less than `CLOSE`,
    a thousandth, times the norm of `serial`; False if `serial` is 0."""
    return bool(norm(value - serial) < CLOSE * norm(serial))


def _of_copies(ranks: Sequence[Sequence[TensorPart]], serial: Array) -> str:
    """Return in words how the copies of a whole gradient that the ranks hold differ: not reduced,
    if their sum is near the `serial` gradient; not averaged, if their mean is; else only that they
    differ. `ranks` has a list of TensorParts for each rank. Return "" for a single rank, for copies
    that are equal but for rounding, and if a rank holds anything but one part of the shape of
    `serial`."""
    copies = [
        parts[0].value
        for parts in ranks
        if len(parts) == 1 and parts[0].value.shape == serial.shape
    ]
    if not len(copies) == len(ranks) > 1 or all(
        np.allclose(copy, copies[0], 1e-6, 0) for copy in copies
    ):
        return ""
    # Each rank holds its own share, because the reduction is missing.
    if is_near(np.sum(copies, 0), serial):
        return "not reduced: each rank has its own part, and these add up to the serial gradient"
    if is_near(np.mean(copies, 0), serial):
        return "not averaged: each rank has its own gradient, whose mean is the serial one"
    return "copies differ between ranks"


def _of_multiple(whole: Array, serial: Array, ratio: float) -> str:
    """Return in words how the gradient `whole` differs from the serial gradient `serial`: if it is
    nearly the serial one, by the norm of their difference, divided by the serial one's norm; if it
    is a multiple, whole, fractional or negative, by the multiple; else "". A positive whole
    multiple, or the inverse of one, is followed by its likely causes. Both gradients are arrays of
    one shape; `ratio` is what `ratio_of` returns for them."""
    if is_near(whole, serial):
        apart = norm(whole - serial) / norm(serial)
        return f"off by {apart:.1g} of its size"
    if not ratio or not is_near(whole / ratio, serial):
        return ""
    times = max(ratio, 1 / ratio)
    if times < 0 or abs(times - round(times)) > CLOSE:
        return f"{ratio:.3f} times the serial gradient"
    if ratio > 1:
        return (
            f"{round(times)} times the serial gradient: added up where it is averaged, or"
            " counted again"
        )
    return (
        f"1/{round(times)} of the serial gradient: divided once too often, or one rank's"
        " share alone"
    )


def _of_microbatches(whole: Array, shares: Sequence[Array]) -> str:
    """Return in words how often each microbatch is counted in a gradient that is a sum of multiples
    of the microbatches' gradients; "" for any other gradient, and for fewer than two microbatches.
    `shares` are the serial run's gradient as accumulated after each microbatch."""
    if len(shares) < 2:
        return ""
    sums = np.stack([np.ravel(share) for share in shares], 1)
    parts = np.diff(sums, axis=1, prepend=0.0)
    # Which multiples of the microbatches add up to this gradient?
    counts, *_ = lstsq(parts, np.ravel(whole), rcond=None)
    if is_near(parts @ counts, np.ravel(whole)):
        return f"microbatches are counted {', '.join(f'{count:.3g}' for count in counts)} times"
    return ""


def _of_rows(whole: Array, serial: Array) -> str:
    """Return in words the contiguous range of rows in which the gradient `whole` differs from the
    serial gradient `serial`, and the ratio of `whole` to `serial` in these rows, by least squares.
    A row differs if one of its elements differs by more than CLOSE (0.001) times the largest
    absolute value in `serial`. Return "" if no row differs, if all rows differ, or if the rows that
    differ are not contiguous. Both gradients are arrays of one shape."""
    rows = np.flatnonzero(
        np.abs(whole - serial).reshape(len(serial), -1).max(1) > CLOSE * np.abs(serial).max()
    )
    if not 0 < len(rows) < len(serial) or len(rows) != rows[-1] - rows[0] + 1:
        return ""
    # Such a range is a shard or a vocabulary entry, and points at a division.
    return (
        f"rows {rows[0]} to {rows[-1]} of {len(serial)} alone differ:"
        f" {ratio_of(whole[rows], serial[rows]):.3f} × serial there"
    )
