"""Each compiled kernel beside its reference, forward and backward, in processor time."""

import shutil

from engine.config import Precision
from experiments.bench.timing import Rounds, on_ranks, ratio, series
from lineage.benchmark import Benchmark, Case
from lineage.progress import Progress, announce

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
SHAPE = {"s": 1024, "b": 1, "n": 12, "d": 64, "v": 50304}
"""GPT-2 124M's, one sequence."""


def measure(rounds: Rounds = 5) -> Benchmark:
    """Each compiled kernel beside its reference in torch and, where there is a compiler, torch.compile."""
    announce(f"{2 + rounds} rounds of every kernel in {' and '.join(PRECISIONS)}, on one core")
    return Benchmark(
        benchmark="kernels",
        title="Compiled kernels beside what they replace",
        cases=[case for precision in PRECISIONS for case in on_ranks("kernels", 1, _measure, precision, rounds)[0]],
        notes=[
            f"forward and backward at the shapes of GPT-2 124M, {SHAPE['s']} tokens; processor time of one thread, "
            "interleaved rounds, after two that are not timed",
            *([] if shutil.which("g++") else ["torch.compile was not measured: there is no C++ compiler"]),
        ],
        setting={"rounds": rounds},
    )


def _measure(precision: Precision, rounds: int) -> list[Case]:
    import torch

    from engine.kernels.adam import AdamStep
    from engine.kernels.registry import KERNELS
    from engine.optim.precision import DTYPES
    from experiments.bench.contenders.kernels import KernelCase, Shape, cases, time_kernel

    dtype, shape = DTYPES[precision], Shape(**SHAPE)
    weights, gradient, *moments = torch.rand(4, 12 * (shape.n * shape.d) ** 2)  # a layer's
    copy = weights.to(dtype) if dtype != weights.dtype else None
    step = AdamStep(1e-3, 0.9, 0.999, 1e-8, 0.01, 0.5, steps=2)
    every = [case for case in cases(shape, dtype) if "cpu" in KERNELS[case.name]]
    every += [
        KernelCase("adamw", [], (weights, copy, gradient, *moments, step)),
        KernelCase("adam_direction", [], (weights, gradient, *moments, step, True)),
    ]
    rows = []
    with Progress(f"kernels, {precision}", len(every), "kernels") as progress:
        for case in every:
            times, missing = time_kernel(case, "cpu", rounds, bool(shutil.which("g++")))
            spent = [series(name, "time", "ms", *(1000 * each for each in many)) for name, many in times.items()]
            ratios = [ratio(f"{name} ÷ ours", many, times["ours"]) for name, many in times.items() if name != "ours"]
            rows.append(Case(name=f"{case.name} {precision}", series=spent, ratios=ratios, missing=missing))
            progress.advance(1, case.name)
    return rows
