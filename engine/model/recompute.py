"""Activations that are computed again in the backward pass instead of kept."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(is_wanted: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns; if it is wanted, what it makes on the way is computed again in the backward pass.

    Randomness is keyed (`engine.rng`), so that no generator's state is kept for it.
    """
    if not (is_wanted and torch.is_grad_enabled()):
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
