"""Trains a configuration in this engine and in another one, from the same weights on the same samples, side by side."""

import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

from engine.config import ModelConfig, RunConfig
from engine.data.dataset import DatasetFacts
from engine.launch.forked import RanksFailed, run_forked
from experiments.verify import tolerance
from experiments.verify.engines import Engine, Ours, StepResult, Weights, Work, initial_weights, write_random_tokens
from experiments.verify.parity import SERIAL, LayoutDiffers, ParityLayout, misfit, parse_layout
from experiments.verify.tensors import Array, Key, Piece, assemble, compare
from lineage.benchmark import Environment
from lineage.environment import describe_environment
from lineage.errors import BadInput
from lineage.files import AGAINST, Against, AgainstCurve, write_document
from lineage.progress import announce
from lineage.run import RunDirectory

LONGEST_SECONDS = 24 * 3600


class Trained(NamedTuple):
    """What a run of an engine gave."""

    steps: list[StepResult]
    weights: dict[Key, Array]
    """Whole tensors at the end."""


def engine_class(name: str) -> type[Engine]:
    """The engine of that name, imported with what it needs. Raises BadInput where a library is missing."""
    if name == "megatron-core":
        from experiments.verify.megatron_core import MegatronCore, make_it_run_on_cpus

        make_it_run_on_cpus()
        return MegatronCore
    if name == "ours":
        return Ours
    from experiments.verify.torch_peers import NanoGPT, Transformers

    return {"transformers": Transformers, "nanogpt": NanoGPT}[name]


def patches_of(name: str) -> list[str]:
    """What is changed in an engine to run here."""
    if name != "megatron-core":
        return []
    from experiments.verify.megatron_core import PATCHES

    return list(PATCHES)


def version_of(name: str) -> str:
    """The engine with the version of its package."""
    return f"{name} {version(name)}" if name in ("megatron-core", "transformers") else name


def prepare(config: RunConfig, layout: str, facts: DatasetFacts | None, theirs: str) -> tuple[RunConfig, ParityLayout]:
    """The configuration and the layout on which both train. Raises BadInput where they cannot.

    No dropout, and every row of the vocabulary a word, as others take padding into the softmax. The schedule of 2019,
    which Megatron-Core has no longer, becomes today's cosine.
    """
    if config.model.family != "gpt2" or config.train.optimizer != "adam" or config.train.rampup_batch_size:
        raise BadInput("other engines are held against a GPT-2 with Adam and without a growing batch")
    if config.train.precision not in ("fp32", "bf16"):
        raise BadInput(f"precision {config.train.precision} is not compared: --set train.precision=fp32 or bf16")
    model: ModelConfig = facts.resize(config.model) if facts else config.model
    decay = "cosine" if config.train.decay == "clipped-cosine" else config.train.decay
    config = config.model_copy(update={
        "model": model.model_copy(update={"vocab_size": model.padded_vocab_size, "dropout": 0.0}),
        "train": config.train.model_copy(update={"decay": decay}),
    })  # fmt: skip
    chosen = SERIAL if layout == "serial" else parse_layout(layout)
    if reason := misfit(chosen, config):
        raise BadInput(f"{chosen.name} does not fit: {reason}")
    return config, chosen


def make_work(
    config: RunConfig, facts: DatasetFacts | None, iterations: int, folder: Path, theirs: str, weights: Weights
) -> Work:
    """What both train. Megatron-Core's first update has the rate of step 0, so ours takes the same."""
    if facts:
        tokens = tuple(zip(facts.prefixes("train"), facts.weights, strict=True))
    else:
        tokens = ((write_random_tokens(config, iterations, folder / "random"), 1.0),)
    first_rate = 0 if theirs == "megatron-core" else 1
    return Work(config, iterations, tokens, facts.tokenizer if facts else None, weights, first_rate)


def keep(result: Against, config: RunConfig, runs: Path) -> Path:
    """A sealed run with the record, its figure and its tables; the same work is found again."""
    from reports.against import against_exhibit
    from reports.exhibit_files import write_exhibit
    from reports.render import render_all

    name = f"against-{result.engine.split()[0]}-{result.name}-{result.layout}-{result.precision}"
    described = {"engine": result.engine, "layout": result.layout, "iterations": len(result.curves[0].ours),
                 "tolerance": result.formula} | config.model_dump(mode="json")  # fmt: skip
    run = RunDirectory.begin(runs, name, "against", described, {}, frozenset({"data"}))
    if not run.is_complete:
        write_document(run.path / AGAINST, result)
        exhibit = against_exhibit("against", result)
        write_exhibit(run.path, exhibit, render_all([exhibit], exhibit.title)[0]["against"])
        run.complete()
    return run.path


def run_against(config: RunConfig, theirs: str, layout: str, iterations: int) -> Against:
    """Both trainings, and what came of them. Raises BadInput for what cannot be compared, LayoutDiffers where ranks fail."""
    facts = DatasetFacts.read(config.data.dataset) if config.data.dataset else None
    config, chosen = prepare(config, layout, facts, theirs)
    other = engine_class(theirs)
    torch.set_num_threads(1)
    announce(
        f"{2 + tolerance.DRAWS} trainings of {iterations} iterations in {config.train.precision}, each on "
        f"{chosen.world_size} processes"
    )
    with tempfile.TemporaryDirectory() as folder:
        work = make_work(
            config, facts, iterations, Path(folder), theirs, initial_weights(config.model, config.train.seed)
        )  # fmt: skip
        first = train(other, work, chosen, 0)
        draws = [train(other, work, chosen, draw) for draw in range(1, tolerance.DRAWS + 1)]
        ours = train(Ours, work, chosen, 0)
    layers = config.model.num_layers
    curves = [
        AgainstCurve(
            quantity=field,
            ours=[getattr(step, field) for step in ours.steps],
            theirs=[getattr(step, field) for step in first.steps],
            tolerance=tolerance.curve_tolerance(
                [getattr(step, field) for step in first.steps],
                [[getattr(step, field) for step in draw.steps] for draw in draws],
                layers,
            ),
        )
        for field in StepResult._fields
    ]
    differences = [
        compare(Piece(*key, (0,) * whole.ndim, ours.weights[key]), whole, "",
                tolerance.tensor_tolerance(whole, [draw.weights[key] for draw in draws], layers))
        for key, whole in first.weights.items()
    ]  # fmt: skip
    return Against(
        benchmark="against", name=config.name, engine=version_of(theirs), layout=chosen.name,
        precision=config.train.precision, formula=tolerance.FORMULA, factor=tolerance.factor(layers),
        draws=tolerance.DRAWS, patches=patches_of(theirs), curves=curves,
        weights={one.tensor.removeprefix("updated "): (one.largest, one.tolerance) for one in differences},
        environment=Environment.model_validate(describe_environment()),
    )  # fmt: skip


def train(kind: type[Engine], work: Work, layout: ParityLayout, draw: int) -> Trained:
    """A run on forked ranks, draw 0 without moved weights."""
    try:
        ranks = run_forked(
            _train_rank, layout.world_size, kind, work, layout, draw, timeout_seconds=LONGEST_SECONDS
        )  # fmt: skip
    except RanksFailed as failure:
        raise LayoutDiffers(f"{kind.__name__} failed: {failure.sentence}") from failure
    return Trained(ranks[0][0], assemble(piece for _, pieces in ranks for piece in pieces))


def _train_rank(kind: type[Engine], work: Work, layout: ParityLayout, draw: int) -> tuple[list[StepResult], list[Piece]]:
    engine = kind(work, layout)  # type: ignore[call-arg]
    steps = []
    for iteration in range(work.iterations):
        if draw:
            engine.move_weights(draw * work.iterations + iteration)
        steps.append(engine.step(iteration))
    pieces: list[Piece] = []
    recorder = engine.recorder(work, pieces.append)
    recorder.iteration = work.iterations - 1
    for name, parameter in engine.parameters():
        recorder.parameter("updated ", name, parameter)
    return steps, pieces
