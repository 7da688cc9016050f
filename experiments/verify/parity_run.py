"""Trains a configuration serially and on layouts of forked ranks, and compares every tensor on the way."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from data_pipeline.tokens.token_file import TokenFile, TokenFileWriter, token_dtype
from engine.config import RunConfig
from engine.costs import parameter_count
from engine.data.dataset import DatasetFacts
from engine.inputs import TrainingInputs
from engine.launch.forked import RanksFailed, run_forked
from engine.launch.mesh import build_mesh
from engine.model.stage_model import StageModel
from engine.optim.schedule import learning_rate
from engine.parallel.layout import layout_of
from engine.parallel.mesh import ParallelMesh
from engine.step import build_step
from experiments.verify.parity import (
    SERIAL,
    TOLERANCE,
    Array,
    Difference,
    LayoutDiffers,
    ParityLayout,
    Piece,
    assemble,
    choose_layouts,
    compare,
    computation_order,
    first_difference,
    merge,
)
from lineage.environment import memory_bytes
from lineage.errors import BadInput
from lineage.progress import announce

PATIENCE = 20
"""How many times the serial run's seconds a layout may take, beside two minutes."""

Reference = dict[tuple[int, str], Array]


@dataclass(frozen=True)
class Work:
    """What every layout trains."""

    config: RunConfig
    iterations: int
    tokens: tuple[tuple[Path, float], ...]
    """Prefixes of the token files, with their weights."""
    tokenizer: Path | None
    """Directory of their tokenizer; random tokens have none."""


@dataclass(frozen=True)
class Outcome:
    """What became of one layout."""

    layout: ParityLayout
    worst: Difference | None
    """The largest difference of all tensors; None if ranks failed."""
    finding: str | None
    """The first tensor that differs, or why ranks failed; None if all is within the tolerance."""
    seconds: float


def run_parity(config: RunConfig, names: str, ranks: int, iterations: int) -> None:
    """Compare the layouts `names` stands for with the serial run, a line each.

    Raises LayoutDiffers for the first that is beyond the tolerance, BadInput for a layout that does not fit.
    """
    facts = DatasetFacts.read(config.data.dataset) if config.data.dataset else None
    model = facts.resize(config.model) if facts else config.model
    config = config.model_copy(
        update={"model": model, "train": config.train.model_copy(update={"precision": "fp64"})}
    )  # fmt: skip
    chosen, others = choose_layouts(names, ranks, config)
    for reason, layouts in others.items():
        print(f"does not fit: {reason}: {', '.join(layout.name for layout in layouts)}")
    if not chosen:
        raise BadInput(f"no layout of at most {ranks} ranks fits but the serial run")
    _check_memory(config, iterations)
    most = max(layout.world_size for layout in chosen)
    announce(f"{1 + len(chosen)} trainings of {iterations} iterations in float64, on up to {most} processes")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if facts:
            tokens = tuple(zip(facts.prefixes("train"), facts.weights, strict=True))
        else:
            tokens = ((_write_tokens(config, iterations, Path(folder) / "random"), 1.0),)
        outcomes = list(_compare_all(Work(config, iterations, tokens, facts.tokenizer if facts else None), chosen))
    wrong = [outcome for outcome in outcomes if outcome.finding]
    if wrong:
        more = f" ({len(wrong) - 1} more of {len(outcomes)} layouts differ)" if len(wrong) > 1 else ""
        raise LayoutDiffers(f"layout {wrong[0].layout.name}: {wrong[0].finding}{more}")
    print(f"{len(outcomes)} layouts compute what the serial run computes, within {TOLERANCE:.0e} in float64")


def _compare_all(work: Work, layouts: Sequence[ParityLayout]) -> Iterator[Outcome]:
    """One outcome after the other, each printed when it is known."""
    start = time.monotonic()
    try:
        reference = assemble(run_forked(_serial_pieces, 1, work, timeout_seconds=24 * 3600)[0])
    except RanksFailed as failure:
        raise LayoutDiffers(f"the serial run itself failed: {failure.sentence}") from failure
    serial_seconds = time.monotonic() - start
    names = [tensor.removeprefix("updated ") for _, tensor in reference if tensor.startswith("updated ")]
    order = computation_order(work.config.model.num_layers, list(dict.fromkeys(names)))
    width = max(12, *(len(layout.name) for layout in layouts))
    batch = work.config.train.global_batch_size
    print(
        f"{work.config.name}: {work.iterations} iterations of {batch} sequences in float64; "
        f"the serial run took {serial_seconds:.1f} s, the tolerance is {TOLERANCE:.0e}"
    )
    print(f"{'layout':{width}}  worst    result   seconds  tensor", flush=True)
    for layout in layouts:
        outcome = _compare_one(work, layout, reference, order, 120 + PATIENCE * serial_seconds)
        worst = f"{outcome.worst.largest:.1e}" if outcome.worst else "-"
        tensor = outcome.worst.tensor if outcome.worst and outcome.worst.largest else "-"
        result = "DIFFERS" if outcome.finding else "ok"
        print(f"{layout.name:{width}}  {worst:7}  {result:7}  {outcome.seconds:7.1f}  {tensor}")
        if outcome.finding:
            print(f"{'':{width}}  first: {outcome.finding}")
        yield outcome


def _compare_one(
    work: Work, layout: ParityLayout, reference: Reference, order: Sequence[str], timeout_seconds: float
) -> Outcome:
    start = time.monotonic()
    try:
        by_rank = run_forked(
            _differences, layout.world_size, work, layout, reference, timeout_seconds=timeout_seconds
        )  # fmt: skip
    except RanksFailed as failure:
        return Outcome(layout, None, failure.sentence, time.monotonic() - start)
    differences = merge([difference for rank in by_rank for difference in rank], reference)
    first = first_difference(differences, order)
    return Outcome(layout, max(differences), first.sentence() if first else None, time.monotonic() - start)


def _serial_pieces(work: Work) -> list[Piece]:
    pieces: list[Piece] = []
    train_and_show(work, SERIAL, lambda piece, rank: pieces.append(piece))
    return pieces


def _differences(work: Work, layout: ParityLayout, reference: Reference) -> list[Difference]:
    """On one rank: how far each piece is from the serial run's tensor. The reference was inherited by the fork."""
    differences: list[Difference] = []

    def take(piece: Piece, rank: str) -> None:
        differences.append(compare(piece, reference[piece.iteration, piece.tensor], rank))

    train_and_show(work, layout, take)
    return differences


def train_and_show(work: Work, layout: ParityLayout, take: Callable[[Piece, str], None]) -> None:
    """Train on this rank's share of the layout; `take` gets every tensor of this rank, with the rank's place."""
    config = layout.configure(work.config)
    train = config.train
    mesh = build_mesh(layout_of(config, layout.world_size), config.parallel.sequence_parallel)
    model, step = build_step(config.model, train, config.parallel, mesh)
    tokens = [(TokenFile(prefix), weight) for prefix, weight in work.tokens]
    inputs = TrainingInputs(config, work.iterations, tokens, work.tokenizer, mesh)
    place = f"tp {mesh.tp.rank}, pp {mesh.pp.rank}, dp {mesh.dp.rank}"
    for iteration in range(work.iterations):

        def show(tensor: str, value: Any, start: tuple[int, ...] = (), iteration: int = iteration) -> None:
            array = value.detach().numpy().copy() if isinstance(value, torch.Tensor) else np.array(value)
            take(Piece(iteration, tensor, start or (0,) * array.ndim, array), place)

        microbatches = inputs.of(iteration)
        firsts = [microbatch.places[0] for microbatch in microbatches]
        with ExitStack() as watches:
            for chunk in model.chunks:
                watches.callback(_watch(chunk, mesh, firsts, train.microbatch_size, show))
            gradient = step.gradient(microbatches)
        inputs.streams.commit()
        show("mean loss", gradient.loss)
        for parameter, whole in step.optimizer.gradients():
            show(f"gradient of {parameter.name}", whole, parameter_start(parameter))
        show("gradient norm", gradient.norm)
        step.update(gradient, learning_rate(train, iteration + 1))
        for parameter in model.parameters:
            show(f"updated {parameter.name}", parameter.local, parameter_start(parameter))


def parameter_start(parameter: Any) -> tuple[int, ...]:
    """Where a rank's part of a parameter begins in the whole."""
    return tuple(
        parameter.axis.rank * size if dim == parameter.dim else 0 for dim, size in enumerate(parameter.local.shape)
    )


def _watch(
    chunk: StageModel, mesh: ParallelMesh, firsts: Sequence[int], microbatch_size: int, show: Callable[..., None]
) -> Callable[[], None]:
    """Show the residual stream, [s, b, h], and the loss of each microbatch that passes forward through the chunk.

    Every schedule takes a chunk through its microbatches in order. What is computed again in the backward pass is not
    shown. Returns what ends the watch.
    """
    passing: list[int] = []
    waiting = list(firsts)
    run_stage, batch_loss = chunk.run_stage, chunk.batch_loss

    def watched_states(*args: Any) -> torch.Tensor:
        passing[:] = [waiting.pop(0)]
        try:
            return run_stage(*args)
        finally:
            if not chunk.stage.is_last:
                passing.clear()

    def watched_loss(*args: Any) -> torch.Tensor:
        value = batch_loss(*args)
        show("loss", value.detach().view(1), (passing.pop() // microbatch_size,))
        return value

    def shows(name: str) -> Callable[[nn.Module, Any, torch.Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            if passing:
                show(f"output of {name}", output, (mesh.sequence_rank * output.size(0), passing[0], 0))

        return hook

    watched = {f"layers.{number}": layer for number, layer in chunk.layers.items()}
    ends = {"embedding": chunk.stage.is_first, "final_layernorm": chunk.stage.is_last}
    watched |= {name: module for name, module in chunk.named_children() if ends.get(name)}
    hooks = [module.register_forward_hook(shows(name)) for name, module in watched.items()]
    vars(chunk).update(run_stage=watched_states, batch_loss=watched_loss)

    def end() -> None:
        del vars(chunk)["run_stage"], vars(chunk)["batch_loss"]
        for hook in hooks:
            hook.remove()

    return end


def _write_tokens(config: RunConfig, iterations: int, prefix: Path) -> Path:
    """Random tokens, keyed by the seed, as a token file of documents that samples run across."""
    random = np.random.RandomState(config.train.seed)
    vocab_size, length = config.model.text_vocab_size, max(config.model.seq_length * 2 // 3, 1)
    documents = iterations * config.train.global_batch_size * 2 + 2
    with TokenFileWriter(prefix, token_dtype(vocab_size)) as writer:
        for _ in range(documents):
            writer.add_document(random.randint(0, vocab_size, length))
    return prefix


def _check_memory(config: RunConfig, iterations: int) -> None:
    """Raise BadInput when the serial run's tensors, which are all kept, would not fit in half of the memory."""
    model, available = config.model, memory_bytes()
    stream = (model.num_layers + 2) * config.train.global_batch_size * model.seq_length * model.hidden_size
    needed = 8 * iterations * (stream + 2 * parameter_count(model))
    if available and needed > available / 2:
        raise BadInput(
            f"the tensors of {iterations} iterations take {needed / 2**30:,.0f} GiB and half of the memory here is "
            f"{available / 2**31:,.0f}: --twin, a smaller train.global_batch_size or fewer --iterations make it less"
        )
