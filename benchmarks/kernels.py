"""The engine's kernels at a shape: exact beside their references, and timed beside these and the GPU's own limits.

Shapes: s sequence, b microbatch, n heads, d head dim, v vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.timing import cpu_seconds, failure, ratio, rounded, series
from mlm_repro.engine.kernels.registry import DTYPES, REFERENCE, implementation
from mlm_repro.engine.launch.mesh import local_device
from mlm_repro.engine.parallel.mesh import LoneAxis
from mlm_repro.engine.rng import DropoutMask
from mlm_repro.experiments.benchmark import Case, Ratio
from mlm_repro.lineage.errors import Diverged

GEMM_WIDTH, COPIED_BYTES = 8192, 1 << 31
REPEATS, WARM_UP = 20, 2
QUEUED = 10
"""Passes that a GPU is given together, so that it does not wait for the host between them."""
FLOOR_SHARE = 0.85
"""The goal of each kernel that is bound by memory: its floor's share of its time."""
OURS, FLOOR, SDPA = "ours", "floor", "SDPA with dropout"
SEQUENCE_FIRST, BATCH_FIRST = "[s, b, h]", "[b, s, h]"
LOSS_SCALE = 2.0**16
"""The loss scale that fp16 begins with. It is in the gradients of a real step."""
FACTORS = (1.0, LOSS_SCALE / 8192, 2.0**-10)
"""Largest gradient that reaches a kernel: also that of a loss over 8,192 tokens, and that of a deep layer."""
Times = tuple[dict[str, list[float]], dict[str, str]]
"""Seconds of each round by name, and why others were not measured."""


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


def kernel_cases(shape: KernelShape, dtype: torch.dtype, device: torch.device | None = None) -> dict[str, KernelCase]:
    """Return by name every kernel that has a gradient, on a device, by default this process's."""
    device = device or local_device()
    s, b, n, d, v = shape.s, shape.b, shape.n, shape.d, shape.v
    h, mask = n * d, DropoutMask(0.1, tuple(range(b)))
    torch.manual_seed(0)

    def leaf(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(size, device=device).mul_(scale).to(dtype).requires_grad_()

    stream, wide, scores = s * b * h, 4 * s * b * h, b * n * s * s
    targets = torch.randint(0, v, (s * b,), device=device)
    cases = [
        KernelCase("bias_gelu", [leaf(s, b, 4 * h), leaf(4 * h)], (), 5 * wide),
        KernelCase("bias_dropout_add", [leaf(s, b, h), leaf(h), leaf(s, b, h)], (mask,), 5 * stream),
        KernelCase("dropout", [leaf(s, b, h)], (mask,), 4 * stream),
        KernelCase("masked_softmax", [leaf(b, n, s, s)], (d**-0.5,), 5 * scores),
        KernelCase("attention", [leaf(s, b, n, 3, d)], (mask,), 11 * stream, 7 * scores * d),
        KernelCase(
            "linear_cross_entropy", [leaf(s * b, h), leaf(v, h, scale=0.02)], (targets, v, LoneAxis()),
            4 * s * b * h + 3 * v * h, 6 * s * b * h * v,
        ),
    ]  # fmt: skip
    return {case.name: case for case in cases}


KERNELS = ("attention", "bias_gelu", "bias_dropout_add", "dropout", "masked_softmax", "linear_cross_entropy")
"""Kernels that have a gradient."""


def run_once(name: str, shape: KernelShape) -> None:
    """Compile a kernel in every number format, and run it forward and backward."""
    for dtype in DTYPES["cuda"]:
        run_pass(implementation(name, "cuda"), kernel_cases(shape, dtype)[name])


def run_pass(function: Callable[..., torch.Tensor], case: KernelCase) -> None:
    """Run forward and, with gradients, backward; gradients are not added to old ones."""
    output = function(*case.tensors, *case.others)
    torch.autograd.grad(output, case.tensors, output.detach())


def time_kernel(case: KernelCase, device: str, rounds: int) -> Times:
    """Time each pass of ours, the reference and torch.compile, on a GPU also of torch's own attention."""
    functions = {OURS: implementation(case.name, device), "reference": implementation(case.name, REFERENCE)}
    functions["torch.compile"] = torch.compile(functions["reference"])
    if case.name == "attention" and device == "cuda":
        functions[SDPA] = _torch_attention
    return time_in_turn({name: partial(run_pass, function, case) for name, function in functions.items()}, rounds)


def time_in_turn(runs: Mapping[str, Callable[[], object]], rounds: int) -> Times:
    """Time every run in turn after a warm-up; only the first must not fail.

    Returns seconds by name, and why others could not be measured: out of memory, not compiled.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    missing = {}
    for _ in range(WARM_UP + rounds):
        for name in list(seconds):
            try:
                seconds[name].append(seconds_of(runs[name]))
            except Exception as error:  # references keep scores and masks; compilers fail in ways of their own
                if name == next(iter(runs)):
                    raise
                del seconds[name]
                missing[name] = failure(error)
                torch.cuda.empty_cache()
    return {name: many[WARM_UP:] for name, many in seconds.items()}, missing


def seconds_of(run: Callable[[], object]) -> float:
    """Return the seconds of a run by the processor's clock or by a GPU's own.

    A GPU is given several runs while it still multiplies something else.
    """
    device = local_device()
    if device.type == "cpu":
        return cpu_seconds(run)[0]
    wide = torch.ones(GEMM_WIDTH, GEMM_WIDTH, device=device)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    torch.mm(wide, wide)
    first.record()
    for _ in range(QUEUED):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / QUEUED


def times_case(name: str, times: Times, goals: Mapping[str, float] | None = None) -> Case:
    """Compare everybody's seconds with those of the first."""
    seconds, missing = times
    (first, ours), *others = seconds.items()
    return Case(
        name=name,
        series=[
            series(who, "time", "ms", *(1000 * each for each in many), kind="computed" if who == FLOOR else "measured")
            for who, many in seconds.items()
        ],
        ratios=[ratio(f"{who} ÷ {first}", many, ours, (goals or {}).get(who)) for who, many in others],
        missing=missing,
    )


def _torch_attention(qkv: torch.Tensor, mask: DropoutMask) -> torch.Tensor:
    """Torch's own attention, with a mask of its own: [s, b, n·d] from [s, b, n, 3, d]."""
    query, key, value = qkv.permute(3, 1, 2, 0, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=mask.probability, is_causal=True)
    return mixed.permute(2, 0, 1, 3).flatten(2)


def measure_limits() -> dict[str, float]:
    """Return the bytes a second of copying, read and written, and the operations a second of square bf16 products."""

    def fastest(run: Callable[[], object]) -> float:
        return min([seconds_of(run) for _ in range(WARM_UP + REPEATS)][WARM_UP:])

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
            spent = median(seconds_of(multiply) for _ in range(REPEATS))
            speeds.append(series(f"{weight}, {name}", "rate", "TFLOP/s", 2e-12 * rows * ins * outs / spent))
    products_case = Case(name="products of a layer", series=speeds, setting={"rows": rows, "hidden": h})
    return [Case(name="limits", series=limits), products_case]


def check_kernels(kind: torch.dtype, shape: KernelShape, names: tuple[str, ...] = KERNELS) -> list[Case | str]:
    """Compare each kernel's largest error, of output and gradients, with that of its reference in the same precision.

    The errors are against the reference in float64. A sentence follows each kernel whose error is larger.
    """
    cases: list[Case | str] = []
    for case in (each for name, each in kernel_cases(shape, kind).items() if name in names):
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
    limits, case = measure_limits(), kernel_cases(shape, torch.bfloat16)[name]
    times, missing = time_kernel(case, "cuda", REPEATS)
    memory = case.moved * 2 / limits["copied_bytes_per_second"]
    products = case.operations / limits["operations_per_second"]
    goals = {"torch.compile": 1.0, SDPA: 1.0} | ({FLOOR: FLOOR_SHARE} if memory >= products else {})
    return [times_case(name, (times | {FLOOR: [max(memory, products)] * REPEATS}, missing), goals)]


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
    times = time_in_turn({name: partial(run_pass, attend, each) for name, each in cases.items()}, rounds)
    return [times_case(f"attention's layout, {str(dtype).removeprefix('torch.')}", times)]
