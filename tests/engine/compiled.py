"""The GPU kernels compiled for a GPU that need not be here, and what each uses of it.

Imported in a process of its own, in which it changes Triton: kernels are compiled, by the rules of
Triton before 3.10.
"""

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.kernels import KernelShape, kernel_cases, run_pass
from mlm_repro.engine.kernels.adam import AdamStep
from mlm_repro.engine.kernels.gpu.cross_entropy import softmax_gradient
from mlm_repro.engine.kernels.registry import implementation

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
PRODUCTS = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
"""Names of instructions that multiply matrices on tensor cores; on sm_90 only those of a group of
warps count."""


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's use of a GPU, by the compiler's own account: registers of a thread, bytes of
    shared memory."""

    kernel: str
    """The kernel's case, and its name in the source."""
    registers: int
    stack: int
    """Bytes of a thread, for spilled registers and local arrays."""
    shared: int
    instructions: int
    in_loop: int
    """Instructions of the longest loop, run once for each tile."""
    tensor_core: int
    """Instructions that multiply matrices on tensor cores."""


def compile_kernels(
    capability: int, dtype: torch.dtype, shape: KernelShape, names: tuple[str, ...] = ()
) -> list[CompiledKernel]:
    """Compile every kernel of the named cases, by default all, forward and backward, for
    sm_`capability` at a shape.

    Nothing is computed: tensors are of torch's meta device.
    """
    target = GPUTarget("cuda", capability, 32)
    absent = {
        "get_current_target": lambda: target,
        "get_current_device": lambda: 0,
        "get_current_stream": lambda device: 0,
    }
    driver.set_active(SimpleNamespace(**absent))  # the answers that Triton needs to compile
    compiled: dict[str, CompiledKernel] = {}
    case, run = "", JITFunction.run

    def count(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = f"{case} {self.__name__.strip('_')}"
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        if name not in compiled:
            compiled[name] = _counted(name, kernel, capability)

    JITFunction.run = count
    try:
        for case, launch in _launches(dtype, shape).items():
            if not names or case in names:
                launch()
    finally:
        JITFunction.run = run
    return list(compiled.values())


def _launches(dtype: torch.dtype, shape: KernelShape) -> dict[str, Callable[[], object]]:
    """Return, by the name of a case, the function that launches its kernels, on tensors without
    values."""
    meta, rows = torch.device("meta"), shape.s * shape.b
    logits = torch.empty(rows, shape.v // 2, dtype=dtype, device=meta)
    targets, sums = (
        torch.empty(rows, dtype=torch.int64, device=meta),
        torch.empty(2, rows, device=meta),
    )
    flat, copy = torch.empty(1 << 20, device=meta), torch.empty(1 << 20, dtype=dtype, device=meta)
    step = AdamStep(1e-3, 0.9, 0.95, 1e-8, 0.1, 0.5, 2)
    return {
        case.name: partial(run_pass, implementation(case.name, "cuda"), case)
        for case in kernel_cases(shape, dtype, meta).values()
    } | {
        "divided cross_entropy": partial(
            softmax_gradient, logits, shape.v // 2, targets, sums[0], sums[0], sums, 0.5
        ),
        "adamw": partial(implementation("adamw", "cuda"), flat, copy, flat, flat, flat, step),
    }


def _counted(name: str, kernel: Any, capability: int) -> CompiledKernel:
    with TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        usage, listing = (
            subprocess.run(
                [TOOLS / "cuobjdump", option, binary], capture_output=True, text=True, check=True
            ).stdout
            for option in ("-res-usage", "-sass")
        )
    taken = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    instructions = [(int(at, 16), text) for at, text in INSTRUCTION.findall(listing)]
    products = sum(PRODUCTS[capability] in text for _, text in instructions)
    shared, longest = kernel.metadata.shared, _longest_loop(instructions)
    return CompiledKernel(
        name, taken["REG"], taken["STACK"], shared, len(instructions), longest, products
    )


def _longest_loop(instructions: list[tuple[int, str]]) -> int:
    """Return the largest number of instructions between a branch and its target before it."""
    lengths = [0]
    for at, text in instructions:
        to = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if to and int(to[1], 16) < at:
            lengths.append(sum(int(to[1], 16) <= place <= at for place, _ in instructions))
    return max(lengths)
