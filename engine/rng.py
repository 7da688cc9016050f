"""Random numbers keyed by their purpose, never by the rank that draws them.

A parameter's initial value depends on (seed, global name, global shape); a dropout mask on (seed, iteration, place in
the global batch, layer, site, position). Any layout therefore starts equal, drops the same elements, and a resumed
run needs no saved generator state.
"""

import hashlib
from dataclasses import dataclass

import torch

from mlm_repro.engine.kernels.dropout import DropoutMask


def key_of(*parts: object) -> int:
    """A 63-bit number that depends on every part."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def initial_normal(seed: int, name: str, shape: tuple[int, ...], std: float) -> torch.Tensor:
    """N(0, std) values of the undivided parameter `name`, fp32."""
    generator = torch.Generator().manual_seed(key_of(seed, "init", name))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


@dataclass(frozen=True)
class Dropout:
    """Dropout of one microbatch in one iteration.

    `samples` are the places of its sequences in the global batch.
    """

    probability: float
    seed: int
    iteration: int
    samples: tuple[int, ...]

    def mask(self, site: str, first_row: int = 0) -> DropoutMask:
        """The masks of one site, from row `first_row` on, equal for every layout."""
        keys = tuple(key_of(self.seed, self.iteration, sample, site) for sample in self.samples)
        return DropoutMask(self.probability, keys, first_row)
