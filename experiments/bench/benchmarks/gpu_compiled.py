"""`mlm-bench gpu-compiled`: every GPU kernel compiled for GPUs that need not be here, and what each takes of one."""

from itertools import product
from typing import TYPE_CHECKING

from experiments.bench.timing import NOTES, load_average, series
from lineage.benchmark import Benchmark, Case, Ratio
from lineage.environment import available_cores
from lineage.extras import import_extra
from lineage.progress import Progress

if TYPE_CHECKING:
    from experiments.bench.contenders.compiled import Compiled

SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}
"""Shared memory that a program may have, by compute capability (CUDA C++ Programming Guide, Section 20.2)."""
HEADS = {64: 16, 80: 32, 96: 20, 128: 24, 160: 160}
"""Heads by head dim: 355m, a GPT-2 of hidden 2,560, 2.5b, 8.3b, 1008b."""
WHOLE = (96, 160)
"""Head dims at which kernels that know no heads are compiled too: for them a width of 1,920 and the widest, 25,600."""
DTYPES = ("bfloat16", "float16", "float32")
MEASURES = {"registers": "", "stack": "bytes", "shared": "bytes", "instructions": "", "in_loop": "", "tensor_core": ""}
"""Fields of `Compiled` that are kept, with their units."""


def measure() -> Benchmark:
    """Every GPU kernel compiled for sm_80, sm_90 and sm_100: registers, stack, shared memory, instructions.

    Needs Triton, no GPU. Goals: shared memory within what a program may have; in 16 bits nothing spilled, and all of
    attention's products on tensor cores.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from importlib.metadata import version

    import_extra("triton", "gpu")
    matrix = list(product(SHARED_BYTES, DTYPES, HEADS))
    spawn = multiprocessing.get_context("spawn")
    cases = []
    with (
        Progress("gpu-compiled", len(matrix), "cases") as progress,
        ProcessPoolExecutor(available_cores(), mp_context=spawn, max_tasks_per_child=1) as pool,
    ):
        for case in pool.map(compile_case, *zip(*matrix, strict=True)):
            cases.append(case)
            progress.advance(1, case.name)
    return Benchmark(
        benchmark="gpu-compiled",
        title="GPU kernels as compiled",
        cases=cases,
        notes=NOTES["gpu-compiled"],
        setting={"triton": version("triton")},
        load_average=[load_average()],
    )


def compile_case(capability: int, dtype: str, head_dim: int) -> Case:
    """The kernels for a GPU, in a number format, at a head dim. It changes Triton for the whole process."""
    from experiments.bench.contenders.kernels import Shape, compile_not_interpret, dtype_named

    compile_not_interpret()
    from experiments.bench.contenders.compiled import compile_kernels

    shape = Shape(n=HEADS[head_dim], d=head_dim)
    names = () if head_dim in WHOLE else ("attention",)
    return summarize(capability, dtype, head_dim, compile_kernels(capability, dtype_named(dtype), shape, names))


def summarize(capability: int, dtype: str, head_dim: int, kernels: "list[Compiled]") -> Case:
    """What the kernels take as a case, beside what they may take."""
    most = max(each.shared for each in kernels) / SHARED_BYTES[capability]
    ratios = [Ratio(name="shared memory ÷ what there is", value=round(most, 4), goal=1, less_is_better=True)]
    if dtype != "float32":
        products = [each for each in kernels if each.kernel.split()[-1] in ("forward", "to_query", "to_key_value")]
        kept = sum(each.stack == 0 for each in kernels) / len(kernels)
        on_tensor_cores = sum(each.tensor_core > 0 for each in products) / len(products)
        ratios.append(Ratio(name="kernels that spill nothing ÷ all", value=round(kept, 4), goal=1))
        ratios.append(Ratio(name="attention kernels on tensor cores ÷ all", value=on_tensor_cores, goal=1))
    return Case(
        name=f"sm_{capability} {dtype} head dim {head_dim}",
        series=[
            series(each.kernel, name.replace("_", " "), unit, getattr(each, name), kind="computed")
            for each in kernels
            for name, unit in MEASURES.items()
        ],
        ratios=ratios,
    )
