"""Memory that does not suffice: met before the first iteration (`TrainingStep.rehearse`), and explained."""

import math
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError

from engine.config import RunConfig
from engine.costs import fullest_rank
from engine.parallel.layout import Layout, layout_of
from engine.parallel.mesh import ParallelMesh
from lineage.errors import BadInput, HardwareMissing

WORTH = 0.98
"""A change that leaves more than this share of the memory is not worth naming."""
Remedy = tuple[str, int]
"""What to add to the command, and the bytes that a rank then needs."""


class OutOfMemory(HardwareMissing):
    """This machine has too little memory for the run: exit code 4."""

    def __init__(self, sentence: str, on_every_rank: bool) -> None:
        super().__init__(sentence)
        self.on_every_rank = on_every_rank


@contextmanager
def explaining_out_of_memory(config: RunConfig, mesh: ParallelMesh, when: str) -> Iterator[None]:
    """Turn an allocation that fails into OutOfMemory, after a table of what a rank needs and what would need less."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_allocation(error):
            raise
        traceback.clear_frames(error.__traceback__)  # gives back what the failed pass held
        asked = re.search("tried to allocate .*", str(error), re.IGNORECASE)
        is_first = _is_first_to_say()
        if is_first:
            print(describe_memory(config, mesh.layout), file=sys.stderr, flush=True)
        rank = mesh.layout.rank(mesh.tp.rank, mesh.pp.rank, mesh.dp.rank)
        sentence = f"rank {rank} ran out of memory {when}" + (f": {asked[0].lower()}" if asked else "")
        raise OutOfMemory(sentence, on_every_rank=is_first) from error


def describe_memory(config: RunConfig, layout: Layout) -> str:
    """A table in GiB: what the largest rank needs by the closed form, and with each change that needs less."""
    memory = fullest_rank(config.model, config.train, config.parallel, layout.dp)
    rows = [("model and optimizer", memory.state), ("activations", memory.activations)]
    rows.append(("the largest rank, by the closed form", memory.total))
    offered = remedies(config, layout)
    rows += [(f"with {change}", size) for change, size in offered]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {size / 2**30:10.3f} GiB" for name, size in rows]
    return "\n".join(lines if offered else [*lines, "no setting needs less: take a smaller model"])


def remedies(config: RunConfig, layout: Layout) -> list[Remedy]:
    """Single changes of the configuration that are possible and need less memory, the one that needs least first."""
    parallel, ranks = config.parallel, layout.world_size
    changes: list[tuple[str, str, Any]] = [
        ("train", "microbatch_size", config.train.microbatch_size // 2),
        ("parallel", "recompute", "selective"),
        ("parallel", "recompute", "full"),
        ("parallel", "shard_optimizer", True),
        ("parallel", "shard_parameters", True),
        ("parallel", "tp", 2 * parallel.tp),
        ("parallel", "pp", 2 * parallel.pp),
    ]
    now = fullest_rank(config.model, config.train, parallel, layout.dp).total
    offered = []
    for section, key, value in changes:
        values = config.model_dump()
        values[section][key] = value
        needed = ranks if key not in ("tp", "pp") else math.lcm(ranks, 2 * parallel.tp * parallel.pp)
        try:
            changed = RunConfig.model_validate(values)
            dp = layout_of(changed, needed).dp
            size = fullest_rank(changed.model, changed.train, changed.parallel, dp).total
        except (ValidationError, BadInput):
            continue
        if size < WORTH * now:
            more = f" --ranks={needed}" if needed != ranks else ""
            offered.append((f"--set {section}.{key}={str(value).lower()}{more}", size))
    return sorted(offered, key=lambda remedy: remedy[1])


def _is_allocation(error: BaseException) -> bool:
    """Whether torch on either kind of device, NumPy or Python was refused memory."""
    refused = "can't allocate memory" in str(error)
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or refused


def _is_first_to_say() -> bool:
    """Whether no other rank has run out of memory before; one of them speaks for all."""
    if not dist.is_initialized():
        return True
    try:
        return bool(dist.distributed_c10d._get_default_store().add("mlm/out-of-memory", 1) == 1)
    except RuntimeError:  # rank 0, which keeps the store, has ended
        return False
