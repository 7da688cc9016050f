"""Compile the attention kernels for a GPU that is not here, and print what each of them takes: run as a process."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engine.kernels.gpu.attention import flash
from engine.rng import DropoutMask


class Absent:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main(capability: int, dtype: str, head_dim: int) -> None:
    """A line of JSON for each kernel of attention, forward and backward, at 1,024 tokens of 8 sequences."""
    driver.set_active(Absent(capability))
    run = JITFunction.run

    def compiled(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        print(json.dumps({"kernel": self.__name__, "shared": kernel.metadata.shared} | _counted(kernel.asm)))

    JITFunction.run = compiled
    qkv = torch.empty(1024, 8, 20, 3, head_dim, dtype=getattr(torch, dtype), device="meta", requires_grad=True)
    output = flash(qkv, DropoutMask(0.1, tuple(range(8))))
    torch.autograd.grad(output, qkv, torch.empty_like(output))


def _counted(compiled: Any) -> dict[str, int]:
    """Bytes of the stack, where spilled registers go, and products on tensor cores of a warp group."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    binary = Path("kernel.cubin")
    binary.write_bytes(compiled["cubin"])
    said = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    stack = re.search(r"STACK:(\d+)", said)
    assert stack, said
    return {"stack": int(stack[1]), "wgmma": compiled["ptx"].count("wgmma.mma_async")}


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
