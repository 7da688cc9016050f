"""Which activations are computed again in the backward pass. Imports no torch.

Dropout is keyed by what it is for (`engine.rng`), so a recomputed pass drops the same elements with no generator state
saved or restored.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recompute:
    """Full recomputation of groups of layers, or selective recomputation of the attention core.

    Selective: scores, softmax, dropout and their product with the values (Korthikanti et al. 2022, Section 5).
    """

    every_layers: int = 0
    """Layers per recomputed group; 0 keeps activations."""
    attention: bool = False


NO_RECOMPUTE = Recompute()
