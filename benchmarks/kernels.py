"""The engine's kernels at a shape: exact beside their references, and timed beside these and the GPU's own limits.

Shapes: s sequence, b microbatch, n heads, d head dim, v vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.timing import device_seconds, failure, ratio, rounded, series
from engine.kernels.registry import DTYPES, REFERENCE, implementation
from engine.launch.mesh import local_device
from engine.parallel.mesh import Axis
from engine.rng import DropoutMask
from experiments.benchmark import Case, Ratio
from lineage.errors import Diverged

GEMM_WIDTH, COPIED_BYTES = 8192, 1 << 31
REPEATS, WARM_UP = 20, 2
QUEUED = 10
"""Passes that a GPU is given together, so that it does not wait for the host between them."""
FLOOR_SHARE = 0.85
"""The goal of each kernel that is bound by memory: its floor's share of its time."""
SDPA = "SDPA with dropout"
SEQUENCE_FIRST, BATCH_FIRST = "[s, b, h]", "[b, s, h]"
LOSS_SCALE = 2.0**16
"""The loss scale that fp16 begins with. It is in the gradients of a real step."""
FACTORS = (1.0, LOSS_SCALE / 8192, 2.0**-10)
"""Largest gradient that reaches a kernel: also that of a loss over 8,192 tokens, and that of a deep layer."""


@dataclass(frozen=True)
class KernelShape:
    """The shape that kernels are measured at; by default one microbatch of the 2.5b model."""

    s: int = 1024
    b: int = 8
    n: int = 20
    d: int = 96
    v: int = 51200


@dataclass(frozen=True)
class KernelCase:
    """A kernel's tensors with a gradient, its other arguments, and the least work that it must do."""

    name: str
    tensors: list[torch.Tensor]
    others: tuple[Any, ...]
    moved: float = 0.0
    """Elements read and written, forward and backward."""
    operations: float = 0.0
    """Operations of its products."""


def kernel_cases(shape: KernelShape, dtype: torch.dtype, device: torch.device | None = None) -> list[KernelCase]:
    """Return every kernel that has a gradient, on a device, by default this process's."""
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
        KernelCase("masked_softmax", [leaf(b, n, s, s)], (d**-0.5,), 5 * scores),
        KernelCase("attention", [leaf(s, b, n, 3, d)], (mask,), 11 * stream, 7 * scores * d),
        KernelCase(
            "linear_cross_entropy", [leaf(s * b, h), leaf(v, h, scale=0.02)], (targets, v, Axis()),
            4 * s * b * h + 3 * v * h, 6 * s * b * h * v,
        ),
    ]  # fmt: skip


KERNELS = ("attention", "bias_gelu", "bias_dropout_add", "dropout", "masked_softmax", "linear_cross_entropy")
"""Kernels that have a gradient."""


def case_of(name: str, shape: KernelShape, dtype: torch.dtype) -> KernelCase:
    """Return the kernel of that name."""
    return next(each for each in kernel_cases(shape, dtype) if each.name == name)


def run_once(name: str, shape: KernelShape) -> None:
    """Compile a kernel in every number format, and run it forward and backward."""
    for dtype in DTYPES["cuda"]:
        run_pass(implementation(name, "cuda"), case_of(name, shape, dtype))


def run_pass(function: Callable[..., torch.Tensor], case: KernelCase) -> None:
    """Run forward and, with gradients, backward; gradients are not added to old ones."""
    output = function(*case.tensors, *case.others)
    if case.tensors:
        torch.autograd.grad(output, case.tensors, output.detach())


def time_kernel(case: KernelCase, device: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Time each pass of ours, the reference and torch.compile, in turn after a warm-up.

    Returns seconds by name, and why others than ours could not be measured: out of memory, not compiled.
    """
    functions = {"ours": implementation(case.name, device), "reference": implementation(case.name, REFERENCE)}
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
    """Return the seconds of a run in each round; the GPU is given several while it still multiplies something else."""
    if local_device().type == "cpu":
        return [device_seconds(run) for _ in range(rounds)]
    wide = torch.ones(GEMM_WIDTH, GEMM_WIDTH, device=local_device())
    run()
    return [device_seconds(run, QUEUED, partial(torch.mm, wide, wide)) / QUEUED for _ in range(rounds)]


def _torch_attention(qkv: torch.Tensor, mask: DropoutMask) -> torch.Tensor:
    """Torch's own attention, with a mask of its own: [s, b, n·d] from [s, b, n, 3, d]."""
    query, key, value = qkv.permute(3, 1, 2, 0, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=mask.probability, is_causal=True)
    return mixed.permute(2, 0, 1, 3).flatten(2)


def measure_limits() -> dict[str, float]:
    """Return the bytes a second of copying, read and written, and the operations a second of square bf16 products."""

    def fastest(run: Callable[[], object]) -> float:
        return min([device_seconds(run) for _ in range(WARM_UP + REPEATS)][WARM_UP:])

    source, target = (torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=local_device()) for _ in range(2))
    copied = 2 * COPIED_BYTES / fastest(lambda: target.copy_(source))
    a, b, out = (torch.randn(GEMM_WIDTH, GEMM_WIDTH, device=local_device()).bfloat16() for _ in range(3))
    multiplied = 2 * GEMM_WIDTH**3 / fastest(lambda: torch.mm(a, b, out=out))
    return {"copied_bytes_per_second": copied, "operations_per_second": multiplied}


def describe_limits(shape: KernelShape) -> list[Case]:
    """Return the limits, and the rates in bf16 of the twelve products of a layer's weights, forward and backward."""
    limits = [series("GPU", name, "1/s", rate) for name, rate in measure_limits().items()]
    rows, h = shape.s * shape.b, shape.n * shape.d
    speeds = []
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
            speeds.append(series(f"{weight}, {name}", "rate", "TFLOP/s", 2e-12 * rows * ins * outs / spent))
    products_case = Case(name="products of a layer", series=speeds, setting={"rows": rows, "hidden": h})
    return [Case(name="limits", series=limits), products_case]


def check_kernels(kind: torch.dtype, shape: KernelShape, names: tuple[str, ...] = KERNELS) -> list[Case | str]:
    """Compare each kernel's largest error, of output and gradients, with that of its reference in the same precision.

    The errors are against the reference in float64. A sentence follows each kernel whose error is larger.
    """
    cases: list[Case | str] = []
    for case in (each for each in kernel_cases(shape, kind) if each.name in names):
        doubled = [tensor.detach().double() for tensor in case.tensors]
        errors = []
        for factor in FACTORS:
            exact = _results(implementation(case.name, REFERENCE), doubled, case.others, factor)
            theirs = _results(implementation(case.name, REFERENCE), case.tensors, case.others, factor)
            ours = _results(implementation(case.name, "cuda"), case.tensors, case.others, factor)
            for true, reference, fused in zip(exact, theirs, ours, strict=True):
                unit = torch.finfo(kind).eps * true.square().mean().sqrt()
                allowed = (reference.double() - true).abs().max() + unit / 4
                errors.append(((fused.double() - true).abs().max() / allowed).item())
        worst = max(errors, key=lambda error: (error != error, error))
        title = f"{case.name} {str(kind).removeprefix('torch.')}, {shape.s * shape.b} tokens"
        if math.isfinite(worst):
            error = Ratio(name="largest error ÷ the reference's", value=rounded(worst), goal=2, less_is_better=True)
            cases.append(Case(name=title, ratios=[error]))
            cases += [] if error.is_reached else [f"{title} has {error.value:.1f} times the reference's error"]
        else:
            cases += [Case(name=title, missing={"ours": f"its error is {worst}"}), f"{title}: its error is {worst}"]
    return cases


def _results(
    function: Callable[..., torch.Tensor], tensors: list[torch.Tensor], others: tuple[Any, ...], factor: float
) -> list[torch.Tensor]:  # fmt: skip
    """Output and gradients. Of a loss, times the loss scale, also the weight's rows of words that are no target."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = function(*leaves, *others)
    drawn = torch.Generator(output.device).manual_seed(0)
    upstream = torch.empty(output.shape, device=output.device).uniform_(-factor, factor, generator=drawn).bfloat16()
    if output.dim() > 0:
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]
    results = [output.detach(), *torch.autograd.grad(output, leaves, LOSS_SCALE * torch.ones_like(output))]
    is_no_target = torch.ones(len(results[-1]), dtype=torch.bool, device=output.device)
    is_no_target[others[0]] = False
    return [*results, results[-1][is_no_target]]


def measure_kernel(name: str, shape: KernelShape) -> list[Case]:
    """Time a kernel, forward and backward, beside its reference, torch.compile, torch's attention and its floor."""
    limits, case = measure_limits(), case_of(name, shape, torch.bfloat16)
    times, missing = time_kernel(case, "cuda", REPEATS)
    seconds = {name: median(many) for name, many in times.items()}
    memory = case.moved * 2 / limits["copied_bytes_per_second"]
    floor, ours = max(memory, case.operations / limits["operations_per_second"]), seconds["ours"]
    spent = [series(name, "time", "ms", 1000 * each) for name, each in seconds.items()]
    ratios = [ratio(f"{name} ÷ ours", [each], [ours], 1.0 if name in ("torch.compile", SDPA) else None)
              for name, each in seconds.items() if name != "ours"]  # fmt: skip
    return [
        Case(
            name=name, series=[*spent, series("floor", "time", "ms", 1000 * floor, kind="computed")],
            ratios=[ratio("floor ÷ ours", [floor], [ours], FLOOR_SHARE if floor == memory else None), *ratios],
            missing=missing, setting={"bound": "products" if floor > memory else "memory"},
        )
    ]  # fmt: skip


def measure_layouts(shape: KernelShape, dtype: torch.dtype, rounds: int = REPEATS) -> list[Case]:
    """Time attention's products and softmax on rows [s, b, h] and [b, s, h], forward and backward, in turn.

    A product's batch is one dimension. Heads of all sequences are one where rows are [s, b, h]; otherwise queries, keys
    and values are copied (2021 paper, Section 4.2). Raises Diverged if the results differ.
    """
    s, b, n, d = shape.s, shape.b, shape.n, shape.d
    torch.manual_seed(0)
    rows = torch.randn(s, b, n, 3, d, device=local_device()).to(dtype)
    orders = {SEQUENCE_FIRST: ((0, 1, 2, 3, 4), (3, 1, 2, 0, 4)), BATCH_FIRST: ((1, 0, 2, 3, 4), (3, 0, 2, 1, 4))}

    def attend(rows: torch.Tensor, heads_first: tuple[int, ...]) -> torch.Tensor:
        query, key, value = rows.permute(heads_first).flatten(1, 2)
        return torch.bmm(F.softmax(torch.bmm(query, key.mT) * d**-0.5, dim=-1), value)

    cases = {name: KernelCase(name, [rows.permute(order).contiguous().requires_grad_()], (heads_first,))
             for name, (order, heads_first) in orders.items()}  # fmt: skip
    sequence_first, batch_first = (attend(each.tensors[0], *each.others) for each in cases.values())
    if not torch.allclose(sequence_first, batch_first, atol=16 * torch.finfo(dtype).eps):
        raise Diverged("attention's results differ in its two layouts")
    spent: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(WARM_UP + rounds):
        for name, each in cases.items():
            seconds = queued_seconds(partial(run_pass, attend, each), 1)
            spent[name] += seconds if number >= WARM_UP else []
    return [Case(
        name=f"attention's layout, {str(dtype).removeprefix('torch.')}",
        series=[series(name, "time", "ms", *(1000 * value for value in many)) for name, many in spent.items()],
        ratios=[ratio(f"{BATCH_FIRST} ÷ {SEQUENCE_FIRST}", spent[BATCH_FIRST], spent[SEQUENCE_FIRST])],
        setting={"s": s, "b": b, "n": n, "d": d},
    )]  # fmt: skip
