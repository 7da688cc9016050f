"""Times the engine's kernels at a shape, beside their references, torch and the GPU's own limits.

Shapes: s sequence, b microbatch, n heads, d head dim, v vocabulary.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import cpu_seconds, failure, ratio, series
from mlm_repro.engine.kernels.products import add_product
from mlm_repro.engine.kernels.registry import REFERENCE, implementation
from mlm_repro.engine.launch.mesh import local_device
from mlm_repro.engine.parallel.mesh import LoneAxis
from mlm_repro.engine.rng import DropoutMask
from mlm_repro.experiments.benchmark import Case, Series

GEMM_WIDTH = 8192
COPIED_BYTES = 1 << 31
REPEATS = 20
FEW = 3
WARM_UP = 2
WIDTHS = (1024, 1920, 3072, 4096, 6144, 12288)
"""Hidden widths of 355m, 2.5b and 8.3b, and of larger models."""
QUEUED = 10
"""Passes that a GPU is given together, so that it does not wait for the host between them."""
OURS = "ours"
SDPA = "SDPA with dropout"
Times = tuple[dict[str, list[float]], dict[str, str]]
"""Seconds of each round by the contender's name, and by name why other contenders were not
measured."""


@dataclass(frozen=True)
class KernelShape:
    """The sizes that kernels are measured at: sequence `s`, microbatch `b`, heads `n`, head's width
    `d` and vocabulary `v`; by default one microbatch of the 2.5b model."""

    s: int = 1024
    b: int = 8
    n: int = 20
    d: int = 96
    v: int = 51200


@dataclass(frozen=True)
class KernelCase:
    """A kernel's name, the tensors to which its gradients belong, and its other arguments, which
    come after the tensors."""

    name: str
    tensors: list[Tensor]
    others: tuple[Any, ...]


def kernel_cases(
    shape: KernelShape, dtype: torch.dtype, device: torch.device | None = None
) -> dict[str, KernelCase]:
    """Return a dict by the kernel's name of a KernelCase for every kernel that has a gradient. Its
    `tensors` are random leaves that require gradients, of the sizes in `shape` and the number
    format `dtype`, on `device`, by default this process's; `others` has the other arguments, such
    as a dropout mask. Seeds torch's generator with 0, so that each call gives the same values."""
    device = device or local_device()
    s, b, n, d, v = shape.s, shape.b, shape.n, shape.d, shape.v
    h = n * d
    mask = DropoutMask(0.1, tuple(range(b)))
    torch.manual_seed(0)

    def leaf(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, device=device).mul_(scale).to(dtype).requires_grad_()

    targets = torch.randint(0, v, (s * b,), device=device)
    cases = [
        KernelCase("bias_gelu", [leaf(s, b, 4 * h), leaf(4 * h)], ()),
        KernelCase("bias_dropout_add", [leaf(s, b, h), leaf(h), leaf(s, b, h)], (mask,)),
        KernelCase("dropout", [leaf(s, b, h)], (mask,)),
        KernelCase("masked_softmax", [leaf(b, n, s, s)], (d**-0.5,)),
        KernelCase("attention", [leaf(s, b, n, 3, d)], (mask,)),
        KernelCase(
            "linear_cross_entropy",
            [leaf(s * b, h), leaf(v, h, scale=0.02)],
            (targets, v, LoneAxis()),
        ),
        KernelCase(
            "add_norm", [leaf(s, b, h), leaf(h), leaf(h), leaf(s, b, h), leaf(h)], (mask, 1e-5)
        ),
    ]
    return {case.name: case for case in cases}


def run_pass(function: Callable[..., Tensor], case: KernelCase) -> None:
    """Run the function of a kernel forward and backward on the tensors and arguments of `case`;
    results and gradients are dropped."""
    outputs = all_of(function(*case.tensors, *case.others))
    torch.autograd.grad(outputs, case.tensors, [output.detach() for output in outputs])


def all_of(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def time_kernel(case: KernelCase, device: str, rounds: int) -> Times:
    """Time, in turn and `rounds` times, forward and backward of three forms of a case's kernel:
    ours for the kind of device `device` ("cpu" or "cuda"), its reference, and the reference under
    torch.compile. That device must be this process's own, and the case's tensors must be there.
    Return two dicts by `ours`, `reference` and `torch.compile`: for each form that never failed a
    list of the seconds of one call in each round, of the processor or by the GPU's own clock, and
    for each other the error as one line. An error of ours is raised. Two rounds before warm up and
    are not counted."""
    functions = {
        OURS: implementation(case.name, device),
        "reference": implementation(case.name, REFERENCE),
    }
    functions["torch.compile"] = torch.compile(functions["reference"])
    return time_in_turn(
        {name: partial(run_pass, function, case) for name, function in functions.items()}, rounds
    )


def time_in_turn(runs: Mapping[str, Callable[[], object]], rounds: int) -> Times:
    """Time the functions `runs`, which are given by name, in turn, each once a round as
    `seconds_of` does, for `rounds` rounds after two more that warm up and are not counted. If the
    first function fails, its error is raised; any other one that fails is dropped.

    Returns a pair of dicts by name: a list of the seconds of one call in each round, for every
    function that never failed, and the error as one line, such as out of memory, for every dropped
    one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    missing = {}
    for _ in range(WARM_UP + rounds):
        for name in list(seconds):
            try:
                seconds[name].append(seconds_of(runs[name]))
            except (
                Exception
            ) as error:  # references keep scores and masks; compilers fail in ways of their own
                if name == next(iter(runs)):
                    raise
                del seconds[name]
                missing[name] = failure(error)
                torch.cuda.empty_cache()
    return {name: many[WARM_UP:] for name, many in seconds.items()}, missing


def seconds_of(run: Callable[[], object]) -> float:
    """Call the function `run` and return the seconds of one call: processor seconds if this
    process's device is a CPU, else by the GPU's own clock.

    On a GPU `run` is first called once without the clock, then ten times in a row, queued while the
    GPU still multiplies something else; the mean of the ten is returned.
    """
    device = local_device()
    if device.type == "cpu":
        return cpu_seconds(run)[0]
    wide = torch.ones(GEMM_WIDTH, GEMM_WIDTH, device=device)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    # A large product keeps the GPU busy while the host queues the timed runs.
    torch.mm(wide, wide)
    first.record()
    for _ in range(QUEUED):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / QUEUED


def times_case(name: str, times: Times, goals: Mapping[str, float] | None = None) -> Case:
    """Return the Case called `name` of a benchmark's record: a series of times in milliseconds for
    each contender, the ratio of every other one's time to the first one's, by its median over the
    rounds, and the reasons why others were not measured. `times` is what `time_in_turn` returns.
    `goals` has, by contender, the least that this ratio should be, such as 1 if the first one
    should not be slower; a contender needs no goal."""
    seconds, missing = times
    (first, ours), *others = seconds.items()
    return Case(
        name=name,
        series=[
            series(who, "time", "ms", *(1000 * duration for duration in many))
            for who, many in seconds.items()
        ],
        ratios=[
            ratio(f"{who} ÷ {first}", many, ours, (goals or {}).get(who)) for who, many in others
        ],
        missing=missing,
    )


def _torch_attention(qkv: Tensor, mask: DropoutMask) -> Tensor:
    """Return torch's own causal attention, [s, b, n·d], of `qkv`, queries, keys and values [s, b,
    n, 3, d]; only the probability of `mask` is used: torch draws its own mask."""
    query, key, value = qkv.permute(3, 1, 2, 0, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(
        query, key, value, dropout_p=mask.probability, is_causal=True
    )
    return mixed.permute(2, 0, 1, 3).flatten(2)


def measure_rates(shape: KernelShape) -> list[Case]:
    """Measure on this process's GPU, in bf16, the rates of a layer's products at widths of 355m to
    175b over 1 to 8 ranks and of the forward pass of attention, in TFLOP/s, and of copying, in
    bytes/s read and written; return a list of a Case for each of the three. Attention is causal,
    without dropout, and only products with keys that are seen count. `shape` gives the rows of a
    product, s·b, and the shortest sequence; its other sizes are not used.

    The planner's constants are taken from these rates. Products for a weight's gradient are also
    measured with the sum into fp32, within the product and after it.
    """
    rows = shape.s * shape.b
    device = local_device()
    speeds = defaultdict[str, list[Series]](list)

    def rate(case: str, name: str, unit: str, work: float, run: Callable[[], object]) -> None:
        speeds[case].append(
            series(name, "rate", unit, work / median(seconds_of(run) for _ in range(FEW)))
        )

    for h, t in product(WIDTHS, (1, 2, 4, 8)):
        for ins, outs in ((h, 3 * h // t), (h // t, h), (h, 4 * h // t), (4 * h // t, h)):
            x, slopes, matrix = (
                torch.randn(size, device=device).bfloat16()
                for size in ((rows, ins), (rows, outs), (outs, ins))
            )
            total = matrix.float()
            for name, product_of, *factors in (
                ("output", torch.mm, x, matrix.t()),
                ("to input", torch.mm, slopes, matrix),
                ("to weight", torch.mm, slopes.t(), x),
                ("to weight, added", add_product, total, slopes.t(), x, True),
                ("to weight, added afterwards", _add_afterwards, total, slopes.t(), x),
            ):
                rate(
                    "products of a layer",
                    f"{name}, {ins} × {outs}",
                    "TFLOP/s",
                    2e-12 * rows * ins * outs,
                    partial(product_of, *factors),
                )
    for s, d in product((shape.s << power for power in range(0, 7, 2)), (64, 96, 128)):
        qkv = torch.randn(s, 1, 8, 3, d, device=device).bfloat16()
        attend = partial(implementation("attention", "cuda"), qkv, None)
        rate("attention without dropout", f"{s} × {d}", "TFLOP/s", 16e-12 * s * s * d, attend)
    for size in (COPIED_BYTES >> power for power in range(0, 12, 3)):
        source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        rate("copying", f"{size} bytes", "bytes/s", 2 * size, partial(target.copy_, source))
    return [Case(name=name, series=many, setting={"rows": rows}) for name, many in speeds.items()]


def _add_afterwards(total: Tensor, a: Tensor, b: Tensor) -> None:
    total.add_(a @ b)


def compare_kernels(shape: KernelShape) -> list[Case]:
    """Time on this process's GPU, at `shape` in bf16, forward and backward: of attention, beside
    the same kernel with a head in one part, with other tiles and without dropout, and beside
    torch's attention, which draws its own mask; and of norms and of GeLU, beside their references
    and torch.compile. Return a list of three Cases, in milliseconds: attention, norms and GeLU."""
    from mlm_repro.engine.kernels.gpu import attention

    every = kernel_cases(shape, torch.bfloat16)
    ours = implementation("attention", "cuda")
    case = every["attention"]
    without = replace(case, others=(None,))

    def changed(name: str, value: object, case: KernelCase = case) -> None:
        with patch.object(attention, name, value):
            run_pass(ours, case)

    tiles = (attention.Tiles(128, 64, 8),) * 3
    runs = {
        OURS: partial(run_pass, ours, case),
        "a head in one part": partial(
            changed, "parts_of", lambda d, _: (1 << (d - 1).bit_length(), 0)
        ),
        "tiles of 128 × 64": partial(changed, "tiles_for", lambda *_: tiles),
        SDPA: partial(run_pass, _torch_attention, case),
    } | {
        f"without dropout, {backend.name}": partial(changed, "BACKENDS", [backend], without)
        for backend in attention.BACKENDS
    }
    return [
        times_case("attention", time_in_turn(runs, REPEATS), {SDPA: 1.0}),
        *(
            times_case(name, time_kernel(every[name], "cuda", FEW))
            for name in ("add_norm", "bias_gelu")
        ),
    ]
