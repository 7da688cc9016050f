"""Random numbers keyed by their purpose, never by the rank that draws them.

A parameter's initial value depends on (seed, global name, global shape); a dropout mask on (seed,
iteration, index in the global batch, layer, site, position). Any layout therefore starts equal,
drops the same elements, and a resumed run needs no saved generator state.
"""

import hashlib
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mlm_repro.engine.kernels.dropout import DropoutMask, keys_on


def key_of(*parts: object) -> int:
    """Return an integer of 63 bits, a hash of the texts of all arguments in order, joined by `/`,
    the same in every process."""
    # BLAKE2, because Python's own hash of a text differs between processes. 63 bits, because
    # GPU kernels take keys as int64.
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def initial_normal(seed: int, name: str, shape: tuple[int, ...], std: float) -> Tensor:
    """Return random values, normal with mean 0 and standard deviation `std`, for the undivided
    parameter `name`: a tensor of `shape` in fp32 on the CPU; the same for the same seed, name,
    shape and deviation."""
    # A generator for each name: parameters can be drawn in any order, and on several threads.
    generator = torch.Generator().manual_seed(key_of(seed, "init", name))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


@dataclass(frozen=True)
class Dropout:
    """Source of the dropout masks of one microbatch in one iteration: the method `mask` returns the
    DropoutMask of a site, a point of the model that is given by its name. A mask follows from
    `seed`, `iteration`, the sequence and the site alone, so it is the same at every layout.

    `probability` is the share of elements that are dropped; `samples` are the indices of the
    microbatch's sequences in the global batch.
    """

    probability: float
    seed: int
    iteration: int
    samples: tuple[int, ...]
    # The model's own dict on a GPU (`PartitionedModel.sites`): a site that one pass asks for is in
    # the table of the next microbatch.
    rows: dict[str, int] = field(default_factory=dict, compare=False)
    """Dict site → its row in this object's `table`. A site gets its row when its mask is first
    used."""
    table: Tensor = field(default_factory=lambda: torch.empty(0), compare=False)
    """Keys of the known sites on a GPU, [sites, sequences of the microbatch] int64; empty on a
    CPU."""

    def keys(self, site: str) -> tuple[int, ...]:
        """Return a tuple of the random keys of a dropout site, a point of the model by name: an
        integer of 63 bits for each sequence of the microbatch."""
        return tuple(key_of(self.seed, self.iteration, sample, site) for sample in self.samples)

    def mask(self, site: str, first_row: int = 0) -> DropoutMask:
        """Return the DropoutMask of `site`, a point of the model by name, from row `first_row` of
        the whole mask on, and enter a new site in this object's dict `rows`, with the next number
        as its row of `table`. The mask is the same at every layout."""
        # A site that the table does not have yet, in a model's first pass, brings its keys in a
        # copy of its own.
        row = self.rows.setdefault(site, len(self.rows))
        return DropoutMask(
            self.probability,
            self.table[row] if row < len(self.table) else self.keys(site),
            first_row,
        )

    def on_device(self, device: torch.device, rows: dict[str, int]) -> "Dropout":
        """Return a copy, a Dropout that shares the dict `rows`, site → number of its row in the
        table. The copy's `table`, int64 [sites, sequences] on `device`, has the keys of these
        sites, computed here, in the dict's order. The host does not wait for a GPU."""
        # One copy for all sites: before, each layer made three.
        return replace(self, rows=rows, table=keys_on([self.keys(site) for site in rows], device))
