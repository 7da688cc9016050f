"""y = xAᵀ + b by the faster of torch's libraries.

On x86 torch multiplies float32 matrices by MKL and bf16 ones by oneDNN. On an AMD Zen 4 core oneDNN is the faster one
in float32 too, most at few rows; only the weight's gradient is as fast by MKL.
"""

from typing import Any

import torch
import torch.nn.functional as F

from engine.torch_names import onednn_linear


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in], weight [out, in] and bias [out] → [..., out]."""
    if x.dtype != torch.float32 or x.device.type != "cpu" or not onednn_linear:
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, weight, bias)):
        output: torch.Tensor = _Linear.apply(x, weight, bias)
        return output
    return _product(x, weight, bias)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = onednn_linear(x, weight, bias, "none", [], "")
    return product


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.size(-1))
        return (
            _product(gradient, weight.t(), None) if to_x else None,
            rows.t() @ x.reshape(-1, x.size(-1)) if to_weight else None,
            rows.sum(dim=0) if to_bias else None,
        )
