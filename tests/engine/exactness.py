"""Each kernel beside its reference, on a GPU or interpreted: the errors of outputs and gradients
against float64."""

import math
from collections.abc import Callable, Collection
from typing import Any

import torch

from benchmarks.kernels import KernelShape, all_of, kernel_cases
from benchmarks.timing import rounded
from mlm_repro.engine.kernels.registry import REFERENCE, implementation
from mlm_repro.experiments.benchmark import Case, Ratio

LOSS_SCALE = 2.0**16
"""The loss scale that fp16 begins with. It is in the gradients of a real step."""
OF_STEP = LOSS_SCALE / 8192
"""The loss scale over the tokens of a step's loss."""
FACTORS = (1.0, OF_STEP, 2.0**-10)
"""Largest gradient that reaches a kernel: also that of a loss over 8,192 tokens, and that of a deep
layer."""


def check_kernels(
    kind: torch.dtype,
    shape: KernelShape,
    names: Collection[str] = (),
    factors: Collection[float] = FACTORS,
) -> list[Case | str]:
    """Compare each kernel's largest error, of output and gradients, with that of its reference in
    the same precision, for gradients as large as each of `factors`.

    The errors are against the reference in float64. A sentence follows each kernel whose error is
    larger.
    """
    cases: list[Case | str] = []
    for case in (
        each for name, each in kernel_cases(shape, kind).items() if not names or name in names
    ):
        doubled = [tensor.detach().double() for tensor in case.tensors]
        errors = []
        for factor in factors:
            exact = _results(implementation(case.name, REFERENCE), doubled, case.others, factor)
            theirs = _results(
                implementation(case.name, REFERENCE), case.tensors, case.others, factor
            )
            ours = _results(implementation(case.name, "cuda"), case.tensors, case.others, factor)
            for true, reference, fused in zip(exact, theirs, ours, strict=True):
                unit = torch.finfo(kind).eps * true.square().mean().sqrt()
                allowed = (reference.double() - true).abs().max() + unit / 4
                errors.append(((fused.double() - true).abs().max() / allowed).item())
        worst = max(errors, key=lambda error: (error != error, error))
        title = f"{case.name} {str(kind).removeprefix('torch.')}, {shape.s * shape.b} tokens"
        if math.isfinite(worst):
            error = Ratio(
                name="largest error ÷ the reference's",
                value=rounded(worst),
                goal=2,
                less_is_better=True,
            )
            cases.append(Case(name=title, ratios=[error]))
            cases += (
                []
                if error.is_reached
                else [f"{title} has {error.value:.1f} times the reference's error"]
            )
        else:
            cases += [
                Case(name=title, missing={"ours": f"its error is {worst}"}),
                f"{title}: its error is {worst}",
            ]
    return cases


def _results(
    function: Callable[..., torch.Tensor],
    tensors: list[torch.Tensor],
    others: tuple[Any, ...],
    factor: float,
) -> list[torch.Tensor]:
    """Output and gradients. Of a loss, times the loss scale, also the weight's rows of words that
    are no target."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output, *more = outputs = all_of(function(*leaves, *others))
    drawn = torch.Generator(output.device).manual_seed(0)
    upstream = (
        torch.empty(output.shape, device=output.device)
        .uniform_(-factor, factor, generator=drawn)
        .bfloat16()
    )
    if output.dim() > 0:
        given = upstream.to(output.dtype)
        return [
            *outputs,
            *torch.autograd.grad(outputs, leaves, [given, *(given.flip(0) for _ in more)]),
        ]
    results = [
        output.detach(),
        *torch.autograd.grad(output, leaves, LOSS_SCALE * torch.ones_like(output)),
    ]
    is_no_target = torch.ones(len(results[-1]), dtype=torch.bool, device=output.device)
    is_no_target[others[0]] = False
    return [*results, results[-1][is_no_target]]
