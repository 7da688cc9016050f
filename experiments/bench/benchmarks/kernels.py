"""Each compiled kernel beside its reference, forward and backward, in processor time."""

import shutil
from functools import partial

from engine.config import Precision
from experiments.bench.kernels import KernelCase, Shape, cases, run_pass
from experiments.bench.timing import Rounds, cpu_seconds, in_turn, on_ranks, ratio, series
from lineage.benchmark import Benchmark, Case
from lineage.progress import announce

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
SHAPE = Shape(s=1024, b=1, n=12, d=64, v=50304)
"""GPT-2 124M's, one sequence."""


def measure(rounds: Rounds = 5) -> Benchmark:
    """Each compiled kernel beside its reference in torch and, where there is a compiler, torch.compile."""
    announce(f"{1 + rounds} rounds of every kernel in {' and '.join(PRECISIONS)}, on one core")
    return Benchmark(
        benchmark="kernels",
        title="Compiled kernels beside what they replace",
        cases=[case for precision in PRECISIONS for case in on_ranks("kernels", 1, _measure, precision, rounds)[0]],
        notes=[
            f"forward and backward at the shapes of GPT-2 124M, {SHAPE.s} tokens; processor time of one thread, "
            "interleaved rounds, after one that is not timed",
            *([] if shutil.which("g++") else ["torch.compile was not measured: there is no C++ compiler"]),
        ],
        setting={"rounds": rounds},
    )


def _measure(precision: Precision, rounds: int) -> list[Case]:
    import torch

    from engine.kernels.adam import AdamStep
    from engine.kernels.registry import KERNELS, REFERENCE, implementation
    from engine.optim.precision import DTYPES

    dtype = DTYPES[precision]
    weights, gradient, *moments = torch.rand(4, 12 * (SHAPE.n * SHAPE.d) ** 2)  # a layer's
    copy = weights.to(dtype) if dtype != weights.dtype else None
    step = AdamStep(1e-3, 0.9, 0.999, 1e-8, 0.01, 0.5, steps=2)
    every = [case for case in cases(SHAPE, dtype) if "cpu" in KERNELS[case.name]]
    every += [
        KernelCase("adamw", [], (weights, copy, gradient, *moments, step)),
        KernelCase("adam_direction", [], (weights, gradient, *moments, step, True)),
    ]
    measurements = {}
    for case in every:
        functions = {"ours": implementation(case.name, "cpu"), "reference": implementation(case.name, REFERENCE)}
        if shutil.which("g++"):
            functions["torch.compile"] = torch.compile(functions["reference"])
        for name, function in functions.items():
            measurements[case.name, name] = partial(cpu_seconds, run_pass, function, case)
    taken, _ = in_turn(f"kernels, {precision}", rounds + 1, measurements)
    rows = []
    for case in every:
        seconds = {name: [spent for spent, _ in many[1:]] for (of, name), many in taken.items() if of == case.name}
        others = {name: many for name, many in seconds.items() if name != "ours"}
        rows.append(
            Case(
                name=f"{case.name} {precision}",
                series=[series(name, "time", "ms", *(1000 * each for each in many)) for name, many in seconds.items()],
                ratios=[ratio(f"{name} ÷ ours", many, seconds["ours"]) for name, many in others.items()],
            )
        )
    return rows
