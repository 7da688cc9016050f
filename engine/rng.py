"""Random numbers keyed by their purpose, never by the rank that draws them.

A parameter's initial value depends on (seed, global name, global shape); a dropout mask on (seed,
iteration, place in the global batch, layer, site, position). Any layout therefore starts equal,
drops the same elements, and a resumed run needs no saved generator state.
"""

import hashlib
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mlm_repro.engine.kernels.dropout import DropoutMask, keys_on


def key_of(*parts: object) -> int:
    """A 63-bit number that depends on every part."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def initial_normal(seed: int, name: str, shape: tuple[int, ...], std: float) -> Tensor:
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
    rows: dict[str, int] = field(default_factory=dict, compare=False)
    """Rows of `table` by site. A site joins them when it is first asked for."""
    table: Tensor = field(default_factory=lambda: torch.empty(0), compare=False)
    """The keys of sites on a GPU, [sites, b] int64. A mask of another site has its own."""

    def keys(self, site: str) -> tuple[int, ...]:
        """One key for each sequence."""
        return tuple(key_of(self.seed, self.iteration, sample, site) for sample in self.samples)

    def mask(self, site: str, first_row: int = 0) -> DropoutMask:
        """The masks of one site, from row `first_row` on, equal for every layout."""
        row = self.rows.setdefault(site, len(self.rows))
        return DropoutMask(
            self.probability,
            self.table[row] if row < len(self.table) else self.keys(site),
            first_row,
        )

    def on_device(self, device: torch.device, rows: dict[str, int]) -> "Dropout":
        """The same with the keys of all sites in `rows` on a GPU, in one copy for which the host
        does not wait."""
        return replace(self, rows=rows, table=keys_on([self.keys(site) for site in rows], device))
