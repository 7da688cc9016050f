"""Triton's kernels on CPU tensors, for tests."""

from typing import Any

import pytest
import torch


def step_as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give tensors on CPUs a GPU's kernels, interpreted, and a GPU's way through a step."""
    interpret(monkeypatch)
    from mlm_repro.engine.kernels import dropout, registry

    for places in registry.KERNELS.values():
        if "cuda" in places:
            monkeypatch.setitem(places, "cpu", places["cuda"])
    monkeypatch.setitem(registry.DTYPES, "cpu", registry.DTYPES["cuda"])
    for module in (registry, dropout):
        monkeypatch.setattr(module, "on_gpu", lambda device: True)
    add_in_fp32(monkeypatch)
    registry.implementation.cache_clear()


def add_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give CPUs torch's sum with a product in `out_dtype`, which only GPUs have."""
    addmm = torch.addmm

    def added(
        total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out_dtype: Any = None, **options: Any
    ) -> Any:
        return addmm(total, a.to(out_dtype), b.to(out_dtype), **options)

    monkeypatch.setattr(torch, "addmm", added)


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mend Triton's interpreter (on for all tests: `tests/conftest.py`), and make tiles small
    enough for it.

    Where it departs from a GPU: it cuts bf16 off, and multiplies its bits as integers. Triton 3.6's
    loops over a number that a kernel is given need NumPy before 2.4.
    """
    pytest.importorskip("triton")
    from triton.runtime import interpreter

    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot
    patch_tensor = interpreter._patch_lang_tensor

    def rounded(numbers: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source.name, target.name) == ("fp32", "bf16"):
            return torch.from_numpy(numbers).bfloat16().view(torch.uint16).numpy()
        return convert(numbers, source, target, mode)

    def product(self: Any, a: Any, b: Any, *more: Any) -> Any:
        if a.dtype.name == "bf16":
            a, b = widened(a), widened(b)
        return dot(self, a, b, *more)

    def widened(handle: Any) -> Any:
        numbers = torch.from_numpy(handle.data.copy()).view(torch.bfloat16).float().numpy()
        return interpreter.TensorHandle(numbers, interpreter.tl.float32)

    def with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_index)
    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", product)
    from mlm_repro.engine.kernels.gpu import bias_dropout_add, bias_gelu, cross_entropy

    tiles: dict[Any, dict[str, int]] = {
        bias_gelu: {"ROWS": 4, "COLUMNS": 64, "STEPS": 2},
        bias_dropout_add: {"ROWS": 4, "MASK_BLOCKS": 2, "STEPS": 2},
        cross_entropy: {"ROW_BYTES": 128, "CHUNK_BYTES": 4000},
    }
    for module, sizes in tiles.items():
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)
