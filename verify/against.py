"""Train one configuration in this engine and in another, from the same weights on the same samples,
and compare."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mlm_repro.data_pipeline.files import DATASET, DataCard
from mlm_repro.engine.compare.tensors import DRAWS, FORMULA, curve_tolerance, factor
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.data.dataset import DatasetFacts
from mlm_repro.engine.model.gpt2 import GPT2
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.experiments.benchmark import (
    AGAINST,
    COMPARED,
    Benchmark,
    Case,
    Series,
    share_of,
    write_benchmark,
)
from mlm_repro.lineage.environment import describe_environment
from mlm_repro.lineage.errors import Diverged
from mlm_repro.lineage.files import read_document
from mlm_repro.lineage.progress import announce
from mlm_repro.lineage.run import RunDirectory
from mlm_repro.verify.engines import Engine, Ours, StepResult, Work, with_samples, with_vocabulary
from mlm_repro.verify.megatron_core import MegatronCore
from mlm_repro.verify.parity import ParityLayout, comparable_layout
from mlm_repro.verify.runner import UNKNOWN, measured, on_ranks, train

CURVES = dict(zip(("loss", "norm", "rate"), COMPARED[:3], strict=True))
"""Name in words of each curve, by its field in a StepResult."""
ENGINES: dict[str, type[Engine]] = {"megatron-core": MegatronCore}


def engine_class(name: str) -> type[Engine]:
    """Return the Engine subclass of another engine by its name in `ENGINES`, such as
    `megatron-core`, after an import of its package. Raises BadInput if the package is missing or
    lacks modules or names that this suite uses, KeyError for an unknown engine."""
    ENGINES[name].prepare()
    return ENGINES[name]


def run_against(config: RunConfig, theirs: str, layout: str, iterations: int) -> Benchmark:
    """Train the configuration, adapted as by `shared_work` (without dropout, for instance), for
    `iterations` on the layout of the name `layout`, in this suite's engine and in the one called
    `theirs`, a key of `ENGINES`, on forked ranks. Return a benchmark's record of losses, gradient
    norms, learning rates and final weights; sentences on those beyond the tolerance, which is
    measured on the other engine, are its `disagreements`. No run is written. Sets torch to one
    thread.

    Raises BadInput for a configuration that cannot be compared, a layout that is unknown or does
    not fit it, or a missing package; Diverged if ranks fail, or if a loss, a gradient norm or a
    rate is not finite; DataMissing or IntegrityFailure for a dataset that is missing or incomplete.
    """
    kind = engine_class(theirs)
    layers = config.model.num_layers
    torch.set_num_threads(1)
    with shared_work(config, layout, iterations, theirs) as (work, chosen):
        announce(
            f"{2 + DRAWS} trainings of {iterations} iterations, each on {chosen.world_size}"
            " processes"
        )
        # The other engine's own runs with weights moved by rounding say how far apart two right
        # programs may be.
        first, *draws = [
            on_ranks(train, kind, work, chosen, UNKNOWN, draw, True) for draw in range(1 + DRAWS)
        ]
        reference = measured(first, draws, config.train.precision)
        ours = on_ranks(train, Ours, work, chosen, reference, 0, True)
    curves = [outcome.ranks[0].steps for outcome in (ours, first, *draws)]
    cases = [_case(quantity, name, curves, theirs, layers) for quantity, name in CURVES.items()]
    shares = [
        share_of(row.tensor.removeprefix("updated "), [row.largest], [row.tolerance])
        for row in ours.rows
    ]
    cases.append(Case(name=COMPARED[3], ratios=shares))
    disagreements = []
    for case in cases:
        disagreements += [
            f"{case.name}: {ratio.name}: the two engines differ by {ratio.value:.3g} times the"
            " tolerance"
            for ratio in case.ratios
            if not ratio.is_reached
        ]
    return Benchmark(
        benchmark="against",
        title=(
            f"{theirs} {kind.release()} beside this engine: {config.name}, {chosen.name},"
            f" {config.train.precision}"
        ),
        cases=cases,
        disagreements=disagreements,
        notes=[
            (
                f"Tolerance {FORMULA}, the factor before the bracket being {factor(layers):.1f}: S"
                f" is how far {DRAWS} runs of {theirs} come from its first when every weight is"
                " moved by up to a unit round-off before every iteration, u the unit round-off of"
                " the format that x is held in (engine/compare/tensors.py)."
            ),
            "A ratio is the largest share of the tolerance that a difference takes.",
            *[f"Changed in {theirs} to run on CPUs: {patch}." for patch in kind.patches],
        ],
        setting={
            "iterations": iterations,
            "trained on": _tokens(config),
            "largest difference of the losses": f"{max(cases[0].series[2].samples):.2g}",
        },
        environment=describe_environment(),
    )


def _tokens(config: RunConfig) -> str:
    """Return in words the number and the source of the training tokens in the configuration's
    dataset, or in all its datasets together; "random tokens" if it names none. Raises the errors of
    `DatasetFacts.read` and `token_files`, such as DataMissing for a dataset that is missing."""
    if not config.data.dataset:
        return "random tokens"
    facts = DatasetFacts.read(config.data.dataset)
    cards = [read_document(path / DATASET, DataCard) for path in facts.directories]
    return (
        f"{sum(len(file.tokens) for file, _ in facts.token_files('train')):,} tokens of"
        f" {'; '.join(card.source or card.name for card in cards)}"
    )


def _case(
    quantity: str, name: str, curves: list[list[StepResult]], theirs: str, layers: int
) -> Case:
    """Return the record's Case of one quantity: four series (ours, theirs, difference, tolerance)
    and, as its only ratio, the largest share of the tolerance that a difference takes. `quantity`
    is its field in a StepResult, `name` its name in words, `theirs` the other engine's name.

    `curves` has a list of StepResults for each training: first ours, then the other engine's, then
    one or several of the other engine with perturbed weights, which give the tolerance together
    with the model's number of `layers`. All have the same iterations. Raises Diverged if the
    quantity is not finite somewhere in the first two.
    """
    ours, others, *moved = [[getattr(step, quantity) for step in steps] for steps in curves]
    if not np.isfinite([ours, others]).all():
        raise Diverged(
            f"the {name} became NaN or infinite in one of the two trainings, so that they cannot be"
            " compared, and no run was written: lower train.learning_rate or train fewer iterations"
        )
    # Measured on the other engine, which knows nothing of ours.
    allowed = curve_tolerance(others, moved, layers)
    apart = [abs(a - b) for a, b in zip(ours, others, strict=True)]
    shown = {"ours": ours, theirs: others, "difference": apart, "tolerance": allowed}
    series = [
        Series(contender=contender, measure=name, samples=values)
        for contender, values in shown.items()
    ]
    return Case(name=name, series=series, ratios=[share_of("all iterations", apart, allowed)])


def keep(result: Benchmark, name: str, config: RunConfig, runs: Path) -> Path:
    """Write a comparison of two engines into a sealed run `name` below `runs`, whose parents are
    the comparison's datasets, and return the run's directory. The identity covers these datasets'
    digests, the configuration without `data`, and the result's title, setting and notes; a complete
    run stays as it is. Raises the errors of `RunDirectory.begin`, such as BadInput if `runs` cannot
    hold directories, and of `complete`."""
    parents = DatasetFacts.read(config.data.dataset).parents if config.data.dataset else {}
    about = {"title": result.title, "setting": result.setting, "notes": result.notes}
    what = about | config.model_dump(mode="json")
    settings = about | config.model_dump(mode="json", exclude_defaults=True)
    run = RunDirectory.begin(runs, name, "against", what, parents, frozenset({"data"}), settings)
    if not run.is_complete:
        write_benchmark(run.path / AGAINST, result)
        run.complete()
    return run.path


@contextmanager
def shared_work(
    config: RunConfig, layout: str, iterations: int, engine: str = "megatron-core"
) -> Iterator[tuple[Work, ParityLayout]]:
    """Context manager: yield a pair, the training of `iterations` that two engines are given, as
    Work with initial weights drawn from the recipe's seed, and the layout named `layout`. Raises
    BadInput if the training cannot be compared with other engines, the layout is unknown or does
    not fit, or the datasets differ in vocabulary; DataMissing or IntegrityFailure for a dataset
    that is missing or incomplete. The Work's files are gone afterwards.

    Dropout is 0. The vocabulary's padding rows count as words, because other engines include them
    in the softmax. The schedule of 2019, which Megatron-Core no longer has, becomes a cosine. The
    first update is step 1 of the schedule, or 0 if `engine` is megatron-core.
    """
    chosen = comparable_layout(config, layout)
    # The nearest schedule that both have.
    decay = "cosine" if config.train.decay == "clipped-cosine" else config.train.decay
    config = with_vocabulary(config)
    model = config.model.model_copy(
        update={"vocab_size": config.model.padded_vocab_size, "dropout": 0.0}
    )
    train = config.train.model_copy(update={"decay": decay})
    config = config.model_copy(update={"model": model, "train": train})
    built = GPT2(model, serial_mesh())
    built.initialize(train.seed)
    weights = {name: parameter.detach() for name, parameter in built.named_parameters()}
    with with_samples(config, iterations) as work:
        yield replace(work, initial=weights, first_rate=int(engine != "megatron-core")), chosen
