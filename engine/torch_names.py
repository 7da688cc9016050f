"""Functions of torch whose names differ between versions, under their newest names, and whether
this processor is fast with oneDNN and multiplies bf16.

The rest of the product uses only names that every supported version has, and never compares
versions.
"""

from typing import Any

import torch
import torch.distributed as dist

# The first name is new in 2.13.
reduce_scatter_single = (
    dist.reduce_scatter_single
    if hasattr(dist, "reduce_scatter_single")
    else dist.reduce_scatter_tensor
)

_capability = torch.backends.cpu.get_cpu_capability()
_has_onednn = torch.backends.mkldnn.is_available()
# Without AVX-512 MKL's products of float32 are faster than oneDNN's, and torch's of bf16 go through
# one number at a time (`engine/kernels/products.py`).
onednn: Any = _capability == "AVX512" and _has_onednn and torch.ops.mkldnn
multiplies_bf16 = (
    _capability != "AVX2" and _has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
)
