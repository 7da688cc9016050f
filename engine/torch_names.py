"""Names of torch that differ between versions, under their newest spelling, and what the processor
can do.

The rest of the product uses only names that every supported version has, and asks for no version.
"""

from typing import Any

import torch
import torch.distributed as dist

# new in 2.13
reduce_scatter_single = (
    dist.reduce_scatter_single
    if hasattr(dist, "reduce_scatter_single")
    else dist.reduce_scatter_tensor
)

_capability, _has_onednn = (
    torch.backends.cpu.get_cpu_capability(),
    torch.backends.mkldnn.is_available(),
)
onednn: Any = _capability == "AVX512" and _has_onednn and torch.ops.mkldnn
multiplies_bf16 = (
    _capability != "AVX2" and _has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
)
