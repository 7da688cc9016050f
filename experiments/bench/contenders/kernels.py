"""The engine's kernels at a shape; a GPU's beside their references, and beside what copying and products allow."""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from engine.kernels.registry import DTYPES, REFERENCE, implementation
from engine.launch.mesh import local_device
from engine.parallel.mesh import Axis
from engine.rng import DropoutMask
from experiments.bench.timing import device_seconds, failure, ratio, rounded, series
from lineage.benchmark import Case, Ratio

GEMM_WIDTH, COPIED_BYTES = 8192, 1 << 31
REPEATS, WARM_UP = 20, 2
QUEUED = 10
"""Passes that a GPU is given together, so that it does not wait for the host between them."""
FLOOR_SHARE = 0.85
"""The goal of each kernel that is bound by memory: its floor's share of its time."""
SDPA = "SDPA with dropout"
SANITIZER = "compute-sanitizer"


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


def cases(shape: Shape, dtype: torch.dtype, device: torch.device | None = None) -> list[KernelCase]:
    """Every kernel that has a gradient, at a shape, on a device, without one on this process's."""
    device = device or local_device()
    s, b, n, d, v = shape.s, shape.b, shape.n, shape.d, shape.v
    h, mask = n * d, DropoutMask(0.1, tuple(range(b)))
    torch.manual_seed(0)

    def leaf(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(size, device=device).mul_(scale).to(dtype).requires_grad_()

    stream, wide, scores = s * b * h, 4 * s * b * h, b * n * s * s
    targets = torch.randint(0, v, (s * b,), device=device)
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


def measure_products(shape: Shape | None = None) -> Case:
    """The twelve products of a layer's four weights, forward and backward, in bf16."""
    shape = shape or Shape()
    rows, h = shape.s * shape.b, shape.n * shape.d
    rates = []
    for weight, (ins, outs) in {
        "query_key_value": (h, 3 * h), "dense": (h, h), "dense_h_to_4h": (h, 4 * h), "dense_4h_to_h": (4 * h, h)
    }.items():  # fmt: skip
        x, gradient = (torch.randn(rows, width, device=local_device()).bfloat16() for width in (ins, outs))
        matrix = torch.randn(outs, ins, device=local_device()).bfloat16()
        products = {
            "output": partial(torch.mm, x, matrix.t()),
            "to input": partial(torch.mm, gradient, matrix),
            "to weight": partial(torch.mm, gradient.t(), x),
        }
        for name, multiply in products.items():
            spent = median(queued_seconds(multiply, REPEATS))
            rates.append(series(f"{weight}, {name}", "rate", "TFLOP/s", 2e-12 * rows * ins * outs / spent))
    return Case(name="products of a layer", series=rates, setting={"rows": rows, "hidden": h})


def check_kernels(dtype: str, shape: Shape | None = None) -> list[Case]:
    """Each kernel's largest error, of output and gradients, over that of the same-precision reference; both against the
    reference in float64.
    """
    rows, kind = [], dtype_named(dtype)
    for case in cases(shape or Shape(s=200, b=2, n=3, d=96, v=1000), kind):
        doubled = [tensor.detach().double() for tensor in case.tensors]
        exact = _results(implementation(case.name, REFERENCE), doubled, case.others)
        theirs = _results(implementation(case.name, REFERENCE), case.tensors, case.others)
        ours = _results(implementation(case.name, "cuda"), case.tensors, case.others)
        ratios = []
        for true, reference, fused in zip(exact, theirs, ours, strict=True):
            unit = torch.finfo(kind).eps * true.square().mean().sqrt()
            allowed = (reference.double() - true).abs().max() + unit / 4
            ratios.append(((fused.double() - true).abs().max() / allowed).item())
        worst = max(ratios, key=lambda ratio: (ratio != ratio, ratio))
        name = f"{case.name} {dtype}"
        if math.isfinite(worst):
            error = Ratio(name="largest error ÷ the reference's", value=rounded(worst), goal=2, less_is_better=True)
            rows.append(Case(name=name, ratios=[error]))
        else:
            rows.append(Case(name=name, missing={"ours": f"its error is {worst}"}))
    return rows


def measure_kernels(limits: dict[str, float], shape: Shape | None = None, is_compared: bool = True) -> list[Case]:
    """Milliseconds of each kernel, forward and backward, of its reference as it is and, if it is compared, compiled by
    torch.compile, of torch's own attention with dropout, and of its floor.
    """
    rows = []
    for case in cases(shape or Shape(), torch.bfloat16):
        times, missing = time_kernel(case, "cuda", REPEATS, is_compared)
        seconds = {name: median(many) for name, many in times.items()}
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
                    ratio("floor ÷ ours", [floor], [ours], FLOOR_SHARE if floor == memory else None),
                    *(ratio(f"{name} ÷ ours", [spent], [ours], 1.0 if name in ("torch.compile", SDPA) else None)
                      for name, spent in seconds.items() if name != "ours"),
                ],
                missing=missing,
                setting={"bound": "products" if floor > memory else "memory"},
            )
        )  # fmt: skip
    return rows


def measure_tiles(shape: Shape | None = None) -> Case:
    """Milliseconds of attention, forward and backward, with other tiles than those it takes."""
    from engine.kernels.gpu import attention
    from engine.kernels.gpu.attention import Tiles

    shape = shape or Shape()
    chosen = attention.tiles_for(shape.d, torch.bfloat16)
    others = [
        chosen,
        (Tiles(64, 64, 4), Tiles(64, 64, 4), Tiles(64, 64, 4)),
        (Tiles(128, 128), Tiles(128, 64), Tiles(64, 128)),
        (Tiles(128, 64, stages=3), Tiles(128, 64, stages=1), Tiles(32, 128, stages=3)),
        (Tiles(128, 32), Tiles(128, 32), Tiles(16, 128)),
    ]
    (case,) = (each for each in cases(shape, torch.bfloat16) if each.name == "attention")
    spent, missing = [], {}
    for tiles in others:
        name = ", ".join(f"{one.queries}×{one.keys} {one.warps} warps {one.stages} stages" for one in tiles)
        name += " (taken)" if tiles is chosen else ""
        vars(attention)["tiles_for"] = partial(_same, tiles)
        try:
            seconds = queued_seconds(partial(run_pass, implementation("attention", "cuda"), case), REPEATS)
            spent.append(series(name, "time", "ms", *(1000 * each for each in seconds)))
        except Exception as error:  # more shared memory than there is, and what else a compiler refuses
            missing[name] = failure(error)
    return Case(name="attention's tiles", series=spent, missing=missing)


def _same(answer: Any, *arguments: Any) -> Any:
    return answer


def sanitize() -> str:
    """What NVIDIA's checker of memory accesses says of every kernel at a small shape.

    Raises RuntimeError where it finds a wrong access or is not here.
    """
    if not shutil.which(SANITIZER):
        raise RuntimeError(f"{SANITIZER} is not here")
    code = f"from {__name__} import Shape, check_kernels; check_kernels('bfloat16', Shape(s=70, b=2, n=2, d=32, v=300))"
    command = [SANITIZER, "--error-exitcode", "9", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1:]
    if done.returncode:
        raise RuntimeError(f"{SANITIZER} ended with {done.returncode}: {''.join(last)}")
    return "".join(last)


def time_kernel(
    case: KernelCase, device: str, rounds: int, is_compared: bool
) -> tuple[dict[str, list[float]], dict[str, str]]:  # fmt: skip
    """Seconds of each pass of ours, of the reference and, if they are compared, of torch.compile, in turn after passes
    that are not counted; and why others than ours could not be measured, as those that run out of memory.
    """
    functions = {"ours": implementation(case.name, device), "reference": implementation(case.name, REFERENCE)}
    if is_compared:
        functions["torch.compile"] = torch.compile(functions["reference"])
    if case.name == "attention" and device == "cuda":
        functions[SDPA] = _torch_attention
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    missing = {}
    for _ in range(WARM_UP + rounds):
        for name in list(seconds):
            run = partial(run_pass, functions[name], case)
            try:
                seconds[name] += queued_seconds(run, 1) if device == "cuda" else [device_seconds(run)]
            except Exception as error:  # references keep scores and masks; compilers fail in ways of their own
                if name == "ours":
                    raise
                del seconds[name]
                missing[name] = failure(error)
                if device == "cuda":
                    torch.cuda.empty_cache()
    return {name: many[WARM_UP:] for name, many in seconds.items()}, missing


def queued_seconds(run: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of a run in each round, of several that the GPU is given while it still multiplies something else."""
    if local_device().type == "cpu":
        return [device_seconds(run) for _ in range(rounds)]
    wide = torch.ones(GEMM_WIDTH, GEMM_WIDTH, device=local_device())
    run()
    return [device_seconds(run, QUEUED, partial(torch.mm, wide, wide)) / QUEUED for _ in range(rounds)]


def _torch_attention(qkv: torch.Tensor, mask: DropoutMask) -> torch.Tensor:
    """Torch's own, with a mask of its own: [s, b, n·d] from [s, b, n, 3, d]."""
    query, key, value = qkv.permute(3, 1, 2, 0, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=mask.probability, is_causal=True)
    return mixed.permute(2, 0, 1, 3).flatten(2)


def compile_not_interpret() -> None:
    """Before Triton is imported: kernels are compiled, by the rules of Triton before 3.10."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def dtype_named(name: str) -> torch.dtype:
    """A number format of GPU kernels by torch's name. Raises KeyError for another."""
    return {str(each).removeprefix("torch."): each for each in DTYPES["cuda"]}[name]


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
