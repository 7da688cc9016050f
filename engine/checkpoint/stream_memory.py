"""Memory of a model for each stream of text: carried between iterations, saved in checkpoints.

A stream is an index in the global batch. Its states are saved by layer and index, so any layout
goes on from them.
"""

from collections.abc import Iterable
from itertools import product
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mlm_repro.engine.checkpoint.shards import reading
from mlm_repro.engine.config import ModelConfig
from mlm_repro.engine.model.microbatch import Recurrence
from mlm_repro.engine.parallel.mesh import ParallelMesh
from mlm_repro.lineage.errors import IntegrityFailure

Places = tuple[int, ...]


class StreamMemory:
    """Memory that a Transformer-XL in training carries from one iteration to the next: for each
    microbatch, by the tuple of its stream indices, the last states of every layer of this rank.
    The method `enter` hands it to the model. After each iteration the caller calls `commit`, which
    puts the new states in its place, or `discard`, which drops them. Empty for a model without
    memory."""

    def __init__(self, model: ModelConfig, mesh: ParallelMesh) -> None:
        self.mesh = mesh
        self.is_kept = model.transformer_xl.memory_length > 0
        self._states: dict[Places, dict[int, Tensor]] = {}
        # Apart from the states until `commit`, so that a rehearsal can be discarded.
        self._passing: dict[Places, Recurrence] = {}

    def enter(self, places: Places) -> Recurrence | None:
        """Return the Recurrence of a microbatch, for the model to read and write. Its `before` has
        the memory of the streams whose indices are in `places`, as it was kept for the same tuple,
        empty at first; its `after` becomes their memory when the method `commit` is called, unless
        `discard` is called before. None for a model without memory."""
        if not self.is_kept:
            return None
        self._passing[places] = Recurrence(self._states.get(places, {}))
        return self._passing[places]

    def commit(self) -> None:
        """Keep the states that the microbatches since the last `commit` or `discard` have left, as
        a Transformer-XL's memory for the next iteration."""
        for places, recurrence in self._passing.items():
            self._states[places] = recurrence.after
        self._passing = {}

    def discard(self) -> None:
        """Drop the Transformer-XL states that the microbatches since the last `commit` or `discard`
        have left, as after a dry run; the memory from before these microbatches stays."""
        self._passing = {}

    def states(self) -> dict[str, Tensor]:
        """Return this rank's memory of streams, as the last `commit` or `load` left it, in the form
        that `save` writes: a dict `LAYER.STREAM` → states [m, h], copied to the host. LAYER is the
        number of a layer in the whole model, STREAM the index of a stream in the global batch. The
        dict is empty on every tensor-parallel rank but the first, because all hold the same states,
        and for a model without memory."""
        named: dict[str, Tensor] = {}
        for places, layers in self._states.items() if self.mesh.tp.rank == 0 else ():
            for (layer, states), (row, place) in product(layers.items(), enumerate(places)):
                named[f"{layer}.{place}"] = states[:, row].cpu().contiguous()
        return named

    def save(self, directory: Path, states: dict[str, Tensor]) -> None:
        """Write `states`, which the method `states` returned, into a checkpoint's directory as a
        file of this rank, `memory-ppNNN-dpNNNNN.safetensors`, named by its pipeline and
        data-parallel rank. Write nothing if there are none."""
        # Stages and data-parallel ranks have layers and streams of their own, and each writes a
        # file.
        if states:
            save_file(
                states,
                directory
                / f"memory-pp{self.mesh.pp.rank:03d}-dp{self.mesh.dp.rank:05d}.safetensors",
            )

    def load(self, directory: Path, groups: Iterable[Places], layers: Iterable[int]) -> None:
        """Load a Transformer-XL's memory of its streams from the checkpoint `directory`, of any
        layout: the states of `layers`, this rank's layer numbers in the whole model, for the stream
        indices of each microbatch in `groups`. `enter` finds the states by the same tuples alone;
        for another tuple the memory begins empty. Does nothing for a model without such memory.

        Raises IntegrityFailure if a stream is missing there or a file cannot be read.
        """
        if not self.is_kept:
            return
        wanted = list(product(groups, layers))
        needed = set[str]()
        for places, layer in wanted:
            needed.update(f"{layer}.{place}" for place in places)
        saved: dict[str, Tensor] = {}
        # All files, because another layout may have written a stream and a layer elsewhere.
        for path in sorted(directory.glob("memory-*.safetensors")):
            with reading(path), safe_open(path, framework="pt") as file:
                saved |= {name: file.get_tensor(name) for name in needed & {*file.keys()}}
        if missing := needed - saved.keys():
            raise IntegrityFailure(
                f"{directory} is damaged: its memory-*.safetensors lack {len(missing)} of the"
                " states that a transformer-xl carries on, one for each layer and stream of text:"
                " move it away, and the run goes on from an earlier one or begins anew"
            )
        for places, layer in wanted:
            states = torch.stack([saved[f"{layer}.{place}"] for place in places], dim=1)
            self._states.setdefault(places, {})[layer] = states.to(self.mesh.device)
