"""Trains a configuration in this engine and in another one, from the same weights on the same samples, side by side."""

from pathlib import Path
from typing import NamedTuple

import torch

from engine.config import RunConfig
from experiments.verify.engines import Engine, Ours, StepResult, Work
from experiments.verify.parity import ParityLayout
from experiments.verify.tensors import Array, Key, Piece, assemble, compare
from experiments.verify.tolerance import DRAWS, FORMULA, curve_tolerance, factor, tensor_tolerance
from experiments.verify.work import described, engine_class, on_ranks, shared_work
from lineage.benchmark import Environment
from lineage.environment import describe_environment
from lineage.files import AGAINST, Against, AgainstCurve, write_document
from lineage.progress import announce
from lineage.run import RunDirectory


class Trained(NamedTuple):
    """What a run of an engine gave."""

    steps: list[StepResult]
    weights: dict[Key, Array]
    """Whole tensors at the end."""

    def curve(self, quantity: str) -> list[float]:
        """A number of every iteration."""
        return [getattr(step, quantity) for step in self.steps]


def run_against(config: RunConfig, theirs: str, layout: str, iterations: int) -> Against:
    """Both trainings. Raises BadInput for what cannot be compared, LayoutDiffers where ranks fail."""
    kind, layers = engine_class(theirs), config.model.num_layers
    torch.set_num_threads(1)
    with shared_work(config, layout, iterations, first_rate=int(theirs != "megatron-core")) as (work, chosen):
        announce(f"{2 + DRAWS} trainings of {iterations} iterations, each on {chosen.world_size} processes")
        first, *draws = [_train(kind, work, chosen, draw) for draw in range(1 + DRAWS)]
        ours = _train(Ours, work, chosen, 0)
    curves = [
        AgainstCurve.model_validate({
            "quantity": quantity, "ours": ours.curve(quantity), "theirs": first.curve(quantity),
            "tolerance": curve_tolerance(first.curve(quantity), [draw.curve(quantity) for draw in draws], layers),
        })
        for quantity in StepResult._fields
    ]  # fmt: skip
    differences = [
        compare(Piece(*key, (0,) * whole.ndim, ours.weights[key]), whole, "",
                tensor_tolerance(whole, [draw.weights[key] for draw in draws], layers))
        for key, whole in first.weights.items()
    ]  # fmt: skip
    return Against(
        benchmark="against", name=config.name, engine=described(theirs), layout=chosen.name,
        precision=config.train.precision, formula=FORMULA, factor=factor(layers), draws=DRAWS,
        patches=list(kind.patches), curves=curves,
        weights={one.tensor.removeprefix("updated "): (one.largest, one.tolerance) for one in differences},
        environment=Environment.model_validate(describe_environment()),
    )  # fmt: skip


def keep(result: Against, config: RunConfig, runs: Path) -> Path:
    """A sealed run with the record, its figure and its tables; the same work is found again."""
    from reports.against import against_exhibit
    from reports.exhibit_files import write_exhibit
    from reports.render import render_all

    name = f"against-{result.engine.split()[0]}-{result.name}-{result.layout}-{result.precision}"
    asked = {"engine": result.engine, "layout": result.layout, "iterations": len(result.curves[0].ours)}
    what = asked | {"tolerance": result.formula} | config.model_dump(mode="json")
    run = RunDirectory.begin(runs, name, "against", what, {}, frozenset({"data"}))
    if not run.is_complete:
        write_document(run.path / AGAINST, result)
        exhibit = against_exhibit("against", result)
        write_exhibit(run.path, exhibit, render_all([exhibit], exhibit.title)[0]["against"])
        run.complete()
    return run.path


def _train(kind: type[Engine], work: Work, layout: ParityLayout, draw: int) -> Trained:
    """A run on forked ranks, draw 0 without moved weights."""
    ranks = on_ranks(_train_rank, layout, kind, work, layout, draw)
    return Trained(ranks[0][0], assemble(piece for _, pieces in ranks for piece in pieces))


def _train_rank(
    kind: type[Engine], work: Work, layout: ParityLayout, draw: int
) -> tuple[list[StepResult], list[Piece]]:  # fmt: skip
    engine, steps = kind(work, layout), []
    pieces: list[Piece] = []
    for iteration in range(work.iterations):
        if draw:
            engine.move_weights(draw * work.iterations + iteration)
        steps.append(engine.step(iteration))
    engine.show_weights(engine.recorder(pieces.append))
    return steps, pieces
