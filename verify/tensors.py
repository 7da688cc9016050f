"""Every tensor of a few iterations of one engine beside another's: which is the first to differ beyond rounding."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from engine.compare.tensors import Key, TensorDifference, TensorPart, assemble, compare_all
from engine.config import RunConfig
from lineage.errors import BadInput
from lineage.progress import announce
from verify.engines import Engine, Work
from verify.parity import ParityLayout
from verify.work import engine_class, on_ranks, shared_work


class Recorded(NamedTuple):
    """Activations, gradients, optimizer state and weights that an engine computed."""

    draws: list[dict[str, list[TensorPart]]]
    """Parts by rank: of the training itself, then of the same training with perturbed weights, for tolerances."""
    unnamed: list[str]
    """Parameters left out because the name map does not name them."""


class Compared(NamedTuple):
    """Differences between two recordings."""

    first: TensorDifference | None
    """The first tensor beyond its tolerance, if any."""
    rows: list[TensorDifference]
    """All common tensors, in order of computation."""
    only: tuple[list[str], list[str]]
    """Tensors of the first recording alone and of the second alone."""


def record(
    config: RunConfig, engine: str, layout: str, iterations: int, draws: int = 0, dropout: float = 0.0
) -> Recorded:
    """Train an engine and record every tensor. Biases and layer norms start away from 0 and 1.

    Every engine uses Megatron-Core's learning rates and its own dropout masks. Raises BadInput if the engine cannot run
    the configuration.
    """
    kind = engine_class(engine)
    torch.set_num_threads(1)
    with shared_work(config, layout, iterations, dropout, nudges=True) as (work, chosen):
        if engine == "megatron-core" and chosen.shard_optimizer:
            raise BadInput("megatron-core's distributed optimizer reduces parts of gradients alone: leave zero1 out")
        announce(f"{1 + draws} trainings of {iterations} iterations, each on {chosen.world_size} processes")
        answers = [on_ranks(_record_rank, chosen, kind, work, chosen, draw) for draw in range(draws + 1)]
    parts = [{f"rank-{rank}": pieces for rank, (pieces, _) in enumerate(ranks)} for ranks in answers]
    return Recorded(parts, sorted({name for _, names in answers[0] for name in names}))


def compare_recorded(reference: Recorded, other: Recorded, precision: str) -> Compared:
    """Compare every tensor of `other` with that of `reference`, whose draws give the tolerances.

    Raises IntegrityFailure if parts overlap or leave holes.
    """
    whole, *moved = (assemble(piece for pieces in ranks.values() for piece in pieces) for ranks in reference.draws)
    ranks = other.draws[0]
    theirs = {(piece.iteration, piece.tensor) for pieces in ranks.values() for piece in pieces}
    first, rows = compare_all(whole, moved, ranks, precision)
    return Compared(first, rows, (_only(whole, theirs), _only(theirs, whole)))


def _only(these: Iterable[Key], others: Iterable[Key]) -> list[str]:
    theirs = {tensor for _, tensor in others}
    return list(dict.fromkeys(tensor for _, tensor in sorted(these) if tensor not in theirs))


def _record_rank(
    kind: type[Engine], work: Work, layout: ParityLayout, draw: int
) -> tuple[list[TensorPart], list[str]]:  # fmt: skip
    """Record one rank; also return its parameters that have no name in the map."""
    engine = kind(work, layout)
    pieces: list[TensorPart] = []
    recorder = engine.recorder(pieces.append)
    engine.run(recorder, draw)
    return pieces, [name for name, _ in engine.parameters() if recorder.ours(name) is None]
