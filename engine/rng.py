"""Randomness that depends on what a number is for, never on which rank draws it.

A parameter's initial value depends on (seed, global name, global shape); a dropout mask on (seed, iteration, place in
the global batch, layer, site, position). Any layout therefore starts equal, drops the same elements, and a resumed
run needs no saved generator state.
"""

import hashlib
from dataclasses import dataclass

import torch


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

    def keep(self, site: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Boolean mask [b, *shape], True where the element stays, equal for every layout.

        Each element has 16 random bits, so the drop probability is exact to 1/65536.
        """
        count = 1
        for size in shape:
            count *= size
        words = torch.empty(len(self.samples), (count + 3) // 4, dtype=torch.int64, device=device)
        generator = torch.Generator(device)
        for row, sample in zip(words, self.samples, strict=True):
            generator.manual_seed(key_of(self.seed, self.iteration, sample, site))
            row.random_(-(2**63), None, generator=generator)
        threshold = round(self.probability * 2**16) - 2**15
        bits = words.view(torch.int16)[:, :count]
        return (bits >= threshold).view(len(self.samples), *shape)

    def scale(self, keep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The factor of each element: 1/(1 − p) where kept, else 0."""
        return keep.to(dtype).mul_(1.0 / (1.0 - self.probability))
