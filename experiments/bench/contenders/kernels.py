"""The engine's kernels at a shape; a GPU's beside their references, and beside what copying and products allow."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from engine.kernels.registry import DTYPES, REFERENCE, implementation
from engine.launch.mesh import local_device
from engine.parallel.mesh import Axis
from engine.rng import DropoutMask
from experiments.bench.timing import device_seconds, ratio, rounded, series
from lineage.benchmark import Case, Ratio

GEMM_WIDTH, COPIED_BYTES = 8192, 1 << 31
REPEATS, WARM_UP = 20, 2
FLOOR_SHARE = 0.85
"""The goal of each kernel: its floor's share of its time."""


@dataclass(frozen=True)
class Shape:
    """What the kernels are measured at; by default one microbatch of the 2.5b model."""

    s: int = 1024
    b: int = 8
    n: int = 20
    d: int = 96
    v: int = 51200


@dataclass(frozen=True)
class KernelCase:
    """A kernel's tensors with a gradient, its other arguments, and what it cannot do without."""

    name: str
    tensors: list[torch.Tensor]
    others: tuple[Any, ...]
    moved: float = 0.0
    """Elements read and written, forward and backward."""
    operations: float = 0.0
    """Of its products."""


def cases(shape: Shape, dtype: torch.dtype) -> list[KernelCase]:
    """Every kernel that has a gradient, at a shape, on this process's device."""
    device = local_device()
    s, b, n, d, v = shape.s, shape.b, shape.n, shape.d, shape.v
    h, mask = n * d, DropoutMask(0.1, tuple(range(b)))
    generator = torch.Generator(device).manual_seed(0)

    def leaf(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).mul_(scale).to(dtype).requires_grad_()

    stream, wide, scores = s * b * h, 4 * s * b * h, b * n * s * s
    targets = torch.randint(0, v, (s * b,), generator=generator, device=device)
    return [
        KernelCase("bias_gelu", [leaf(s, b, 4 * h), leaf(4 * h)], (), 5 * wide),
        KernelCase("bias_dropout_add", [leaf(s, b, h), leaf(h), leaf(s, b, h)], (mask,), 5 * stream),
        KernelCase("dropout", [leaf(s, b, h)], (mask,), 4 * stream),
        KernelCase("layer_norm", [leaf(s, b, h), leaf(h), leaf(h)], (1e-5,), 5 * stream),
        KernelCase("masked_softmax", [leaf(b, n, s, s)], (d**-0.5,), 5 * scores),
        KernelCase("attention", [leaf(s, b, n, 3, d)], (mask,), 11 * stream, 7 * scores * d),
        KernelCase(
            "linear_cross_entropy",
            [leaf(s * b, h), leaf(v, h, scale=0.02)],
            (targets, v, Axis()),
            4 * s * b * h + 3 * v * h,
            6 * s * b * h * v,
        ),
    ]


def copied_bytes_per_second(size: int) -> float:
    """Bytes read and written in copying so many, the best of several tries."""
    source, target = (torch.zeros(size, dtype=torch.uint8, device=local_device()) for _ in range(2))
    return 2 * size / min(_seconds(lambda: target.copy_(source)))


def measure_limits() -> dict[str, float]:
    """Bytes a second read and written in copying, and operations a second of square bf16 products."""
    copied = copied_bytes_per_second(COPIED_BYTES)
    a, b, out = (torch.randn(GEMM_WIDTH, GEMM_WIDTH, device=local_device()).bfloat16() for _ in range(3))
    multiplied = 2 * GEMM_WIDTH**3 / min(_seconds(lambda: torch.mm(a, b, out=out)))
    return {"copied_bytes_per_second": copied, "operations_per_second": multiplied}


def check_kernels(shape: Shape | None = None) -> list[Case]:
    """Each kernel's largest error, of output and gradients, over that of the same-precision reference; both against the
    reference in float64.
    """
    rows = []
    for dtype in DTYPES["cuda"]:
        for case in cases(shape or Shape(s=200, b=2, n=3, d=96, v=1000), dtype):
            doubled = [tensor.detach().double() for tensor in case.tensors]
            exact = _results(implementation(case.name, REFERENCE), doubled, case.others)
            theirs = _results(implementation(case.name, REFERENCE), case.tensors, case.others)
            ours = _results(implementation(case.name, "cuda"), case.tensors, case.others)
            ratios = []
            for true, reference, fused in zip(exact, theirs, ours, strict=True):
                unit = torch.finfo(dtype).eps * true.square().mean().sqrt()
                allowed = (reference.double() - true).abs().max() + unit / 4
                ratios.append(((fused.double() - true).abs().max() / allowed).item())
            worst = max(ratios, key=lambda ratio: (ratio != ratio, ratio))
            name = f"{case.name} {str(dtype).removeprefix('torch.')}"
            if math.isfinite(worst):
                error = Ratio(name="largest error ÷ the reference's", value=rounded(worst), goal=2, less_is_better=True)
                rows.append(Case(name=name, ratios=[error]))
            else:
                rows.append(Case(name=name, missing={"ours": f"its error is {worst}"}))
    return rows


def measure_kernels(limits: dict[str, float], shape: Shape | None = None, is_compared: bool = True) -> list[Case]:
    """Milliseconds of each kernel, forward and backward, of its reference as it is and, if it is compared, compiled by
    torch.compile, and of its floor.
    """
    rows = []
    for case in cases(shape or Shape(), torch.bfloat16):
        seconds = {name: median(many) for name, many in time_kernel(case, "cuda", REPEATS, is_compared).items()}
        memory = case.moved * 2 / limits["copied_bytes_per_second"]
        floor = max(memory, case.operations / limits["operations_per_second"])
        ours = seconds["ours"]
        rows.append(
            Case(
                name=case.name,
                series=[
                    *(series(name, "time", "ms", 1000 * spent) for name, spent in seconds.items()),
                    series("floor", "time", "ms", 1000 * floor, kind="computed"),
                ],
                ratios=[
                    ratio("floor ÷ ours", [floor], [ours], FLOOR_SHARE),
                    *(ratio(f"{name} ÷ ours", [spent], [ours], 1.0 if name == "torch.compile" else None)
                      for name, spent in seconds.items() if name != "ours"),
                ],
                setting={"bound": "products" if floor > memory else "memory"},
            )
        )  # fmt: skip
    return rows


def time_kernel(case: KernelCase, device: str, rounds: int, is_compared: bool) -> dict[str, list[float]]:
    """Seconds of each pass of ours, of the reference and, if they are compared, of torch.compile, in turn after passes
    that are not counted; without what runs out of memory.
    """
    functions = {"ours": implementation(case.name, device), "reference": implementation(case.name, REFERENCE)}
    if is_compared:
        functions["torch.compile"] = torch.compile(functions["reference"])
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(WARM_UP + rounds):
        for name in list(seconds):
            try:
                seconds[name].append(device_seconds(partial(run_pass, functions[name], case)))
            except torch.OutOfMemoryError:  # references keep scores and masks
                del seconds[name]
                torch.cuda.empty_cache()
    return {name: many[WARM_UP:] for name, many in seconds.items()}


def run_pass(function: Callable[..., torch.Tensor], case: KernelCase) -> None:
    """Forward and, where it has gradients, backward; these are not added to old ones."""
    output = function(*case.tensors, *case.others)
    if case.tensors:
        torch.autograd.grad(output, case.tensors, output.detach())


def _results(
    function: Callable[..., torch.Tensor], tensors: list[torch.Tensor], others: tuple[Any, ...]
) -> list[torch.Tensor]:  # fmt: skip

    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = function(*leaves, *others)
    upstream = torch.linspace(-1.0, 1.0, output.numel(), device=output.device).view(output.shape).to(torch.bfloat16)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]


def _seconds(run: Callable[[], object]) -> list[float]:
    """Of each of several runs, after some that are not counted."""
    return [device_seconds(run) for _ in range(WARM_UP + REPEATS)][WARM_UP:]
