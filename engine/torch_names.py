"""The names that differ within the range of torch versions, each under the newest one.

The rest of the product uses no name that is missing from a version of the range, and asks for no version.
"""

from typing import Any

import torch.distributed as dist

if hasattr(dist, "reduce_scatter_single"):
    reduce_scatter_single = dist.reduce_scatter_single
else:  # before 2.13
    reduce_scatter_single = dist.reduce_scatter_tensor


class ProcessGroup(dist.ProcessGroup):
    """A process group written in Python, whose `reduce_scatter_single` every version calls."""

    def _reduce_scatter_base(self, *arguments: Any) -> Any:  # what torch before 2.13 calls
        return self.reduce_scatter_single(*arguments)
