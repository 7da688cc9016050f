"""Scale, mask and softmax of attention scores, fused in the 2021 paper (Section 4.2).

Shapes: b microbatch, n heads, s queries, k keys.
"""

import torch


def reference(scores: torch.Tensor, scale: float, visible: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax of scores [b, n, s, k] × scale over the keys, in fp32 (fp64 stays fp64).

    The mask is causal, with the last query seeing every key, or `visible` [b, 1, s or 1, k]. A query without any key
    gives NaN.
    """
    s, k = scores.shape[-2:]
    if visible is None:
        visible = torch.ones(s, k, dtype=torch.bool, device=scores.device).tril_(k - s)
    work = scores.dtype if scores.dtype == torch.float64 else torch.float32
    scaled = scores if scale == 1 else scores * scale
    return torch.softmax(scaled.masked_fill(~visible, float("-inf")), dim=-1, dtype=work).to(scores.dtype)
