"""Scale, mask and softmax of attention scores, which the 2021 paper fuses (Section 4.2).

Shapes: b microbatch, n heads, s queries, k keys.
"""

import torch


def reference(scores: torch.Tensor, scale: float, visible: torch.Tensor | None = None) -> torch.Tensor:
    """Weights [b, n, s, k] of scores [b, n, s, k] × scale, computed in fp32 (fp64 stays fp64).

    Causal, the last query seeing every key, or a query sees the keys where `visible` is True: [b, 1, s or 1, k]. One
    that sees none gives NaN.
    """
    s, k = scores.shape[-2:]
    if visible is None:
        visible = torch.ones(s, k, dtype=torch.bool, device=scores.device).tril_(k - s)
    work = scores.dtype if scores.dtype == torch.float64 else torch.float32
    scaled = scores if scale == 1 else scores * scale
    return torch.softmax(scaled.masked_fill(~visible, float("-inf")), dim=-1, dtype=work).to(scores.dtype)
