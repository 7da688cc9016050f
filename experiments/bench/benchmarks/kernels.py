"""Each compiled kernel beside its reference, forward and backward, in processor time."""

import shutil
import time
from collections.abc import Callable
from typing import Any

from engine.config import Precision
from experiments.bench.timing import Rounds, on_ranks, ratio, series
from lineage.benchmark import Benchmark, Case
from lineage.progress import Progress, announce

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
HEADS, HEAD_DIM, SEQUENCE, VOCABULARY = 12, 64, 1024, 50304
"""GPT-2 124M's, one sequence."""


def measure(rounds: Rounds = 5) -> Benchmark:
    """Each compiled kernel beside its reference in torch and, where there is a compiler, torch.compile."""
    import torch._dynamo  # noqa: F401  (imported here once)

    announce(f"{1 + rounds} rounds of every kernel in {' and '.join(PRECISIONS)}, on one core")
    return Benchmark(
        benchmark="kernels",
        title="Compiled kernels beside what they replace",
        cases=[case for precision in PRECISIONS for case in on_ranks("kernels", 1, _measure, precision, rounds)[0]],
        notes=[
            f"forward and backward at the shapes of GPT-2 124M, {SEQUENCE} tokens; processor time of one thread, "
            "interleaved rounds, after one that is not timed",
            *([] if shutil.which("g++") else ["torch.compile was not measured: there is no C++ compiler"]),
        ],
        setting={"rounds": rounds},
    )


def _measure(precision: Precision, rounds: int) -> list[Case]:
    import torch

    from engine.kernels.adam import AdamStep
    from engine.kernels.registry import REFERENCE, implementation
    from engine.optim.precision import DTYPES
    from engine.parallel.mesh import Axis
    from engine.rng import DropoutMask

    dtype, h = DTYPES[precision], HEADS * HEAD_DIM
    targets = torch.randint(0, VOCABULARY, (SEQUENCE,))
    weights, gradient, *moments = torch.rand(4, 12 * h * h)  # a layer's
    copy = weights.to(dtype) if dtype != weights.dtype else None
    step = AdamStep(1e-3, 0.9, 0.999, 1e-8, 0.01, 0.5, steps=2)
    cases: dict[str, tuple[list[torch.Tensor], tuple[Any, ...]]] = {
        "attention": ([torch.randn(SEQUENCE, 1, HEADS, 3, HEAD_DIM)], (DropoutMask(0.1, (1,)),)),
        "dropout": ([torch.randn(SEQUENCE, 1, h)], (DropoutMask(0.1, (1,)),)),
        "bias_gelu": ([torch.randn(SEQUENCE, 1, 4 * h), torch.randn(4 * h)], ()),
        "bias_dropout_add": (
            [torch.randn(SEQUENCE, 1, h), torch.randn(h), torch.randn(SEQUENCE, 1, h)],
            (DropoutMask(0.1, (1,)),),
        ),
        "linear_cross_entropy": (
            [torch.randn(SEQUENCE, h), torch.randn(VOCABULARY, h) * 0.02],
            (targets, VOCABULARY, Axis()),
        ),
        "adamw": ([], (weights, copy, gradient, *moments, step)),
        "adam_direction": ([], (weights, gradient, *moments, step, True)),
    }
    rows = []
    with Progress(f"kernels, {precision}", len(cases), "kernels") as progress:
        for name, (tensors, others) in cases.items():
            leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
            functions = {"ours": implementation(name, "cpu"), "reference": implementation(name, REFERENCE)}
            if shutil.which("g++"):
                functions["torch.compile"] = torch.compile(functions["reference"])

            def timed(
                function: Callable[..., torch.Tensor],
                leaves: list[torch.Tensor] = leaves,
                others: tuple[Any, ...] = others,
            ) -> float:
                start = time.process_time()
                outputs = function(*leaves, *others)
                if leaves:
                    outputs.sum().backward()
                return time.process_time() - start

            seconds: dict[str, list[float]] = {each: [] for each in functions}
            for _ in range(rounds + 1):
                for each, function in functions.items():
                    seconds[each].append(timed(function))
            rows.append(
                Case(
                    name=f"{name} {precision}",
                    series=[
                        series(each, "time", "ms", *(1000 * output for output in many[1:]))
                        for each, many in seconds.items()
                    ],
                    ratios=[
                        ratio(f"{each} ÷ ours", many[1:], seconds["ours"][1:])
                        for each, many in seconds.items()
                        if each != "ours"
                    ],
                )
            )
            progress.advance(1, name)
    return rows
