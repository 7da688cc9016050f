"""Plan of a reproduction on this machine, and its cost. Imports no torch."""

import math
from dataclasses import dataclass
from pathlib import Path

from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.costs import (
    checkpoint_bytes,
    flops_per_iteration,
    fullest_rank,
    parameter_count,
    tokens_trained,
)
from mlm_repro.engine.run.resolved import default_ranks, read_run_config
from mlm_repro.engine.twin import describe_scale, initial_deviation, twin_seconds
from mlm_repro.experiments.launch.job import Job, format_days
from mlm_repro.experiments.reproduce.files import LADDER
from mlm_repro.lineage.config import load_config, override_config
from mlm_repro.lineage.digest import is_sealed
from mlm_repro.lineage.environment import list_gpus
from mlm_repro.lineage.errors import BadInput, HardwareMissing
from mlm_repro.lineage.shipped import HOME, model_file

RECIPES = HOME / "data_pipeline" / "recipes"
FULL_RECIPE = RECIPES / "available-2019.toml"
SEED_MARK = "-seed-"
"""Text in the name of a training with another seed than its recipe's, before the seed."""
SEEDS = "seeds"
"""Name of the folder for trainings with further seeds, so that the folder of runs shows one
training a model."""


RATE = 0.00589
"""Learning rate of a model of `OF_PARAMETERS` that is trained on `OF_TOKENS`, by the rule that a
ladder of small models gave, rounded: a line through the best rate of each of five sizes that were
tried at the same rates, so it favours none. Its run is results/ladder of commit 59d8d8b4."""
OF_PARAMETERS = 171_000
OF_TOKENS = 1_450_000
BY_SIZE = -0.423
"""Exponent of N / `OF_PARAMETERS`, with N parameters, in the factor by which the rate is
multiplied."""
BY_LENGTH = -0.32
"""Exponent of (tokens / `OF_TOKENS`) in the factor by which the rate is multiplied."""
RATE_RULE = (
    f"learning rate = {RATE:g} · (N / {OF_PARAMETERS:,})^{BY_SIZE:.3f}"
    f" · (tokens / {OF_TOKENS:,})^{BY_LENGTH:g}"
)
FULL_EFFICIENCY_FLOPS = 30e12
"""Floating-point operations per second and GPU in the 2019 paper's runs; only for the estimate of
days."""


@dataclass(frozen=True)
class Size:
    """One scale, smoke or twin, of the small copies of published models that a reproduction trains:
    the file `recipe` of their data; the `suffix` of their names; `overrides`, texts KEY=VALUE for a
    published model's configuration; the numbers of `windows` and `examples` that are scored; and
    the number of `seeds`."""

    recipe: Path
    suffix: str
    overrides: tuple[str, ...]
    windows: int
    """Number of WikiText-103 windows that are scored for each model."""
    examples: int
    """Number of LAMBADA examples that are scored for each model."""
    seeds: int = 1
    """Number of trainings of each model by default, each with its own seed."""


FACTORS = (
    "twin.hidden_size=32",
    "twin.num_heads=8",
    "twin.num_layers=24",
    "twin.vocab_size=49",
    "twin.global_batch_size=32",
)
"""Factors by which the twins of a reproduction are shrunk: the largest then sees at least five
tokens a parameter."""
# Two seeds, so that a reproduction's intervals are over seeds as well as over articles.
TWIN = Size(
    RECIPES / "twin.toml",
    "twin",
    FACTORS,
    windows=3_000,
    examples=1_000,
    seeds=2,
)
SMOKE = Size(
    RECIPES / "smoke.toml",
    "smoke",
    (
        *FACTORS,
        "train.iterations=12",
        "train.warmup_iterations=1",
        "train.validation_interval=4",
        "train.validation_samples=32",
        "train.checkpoint_interval=6",
        "train.global_batch_size=4",
        "train.microbatch_size=2",
    ),
    windows=100,
    examples=100,
)


@dataclass(frozen=True)
class Plan:
    """The plan of a reproduction: in `target` the name of its largest model, such as `8.3b`; in
    `mode` the size, full or scaled, and in `reason`, in words, why it has this size; in `recipe`
    the path of the data recipe. The tuples `published` and `configs` have a RunConfig each for
    every training, in the same order: the model's published recipe, and the one to train."""

    target: str
    mode: str
    """Size of the models: "full", as published, or "scaled", twins."""
    reason: str
    recipe: Path
    size: Size | None
    """Scale of the twins; None for the full size."""
    published: tuple[RunConfig, ...]
    """The published recipe of each item of `configs`: all models up to the target, smallest first,
    repeated for every seed."""
    configs: tuple[RunConfig, ...]
    """Recipe of each model to train: the published one or its twin."""

    def overrides(self, config: RunConfig) -> list[str]:
        """Return a list of the overrides, `key=value` texts, with which `mlm-train run --twin`
        makes the recipe `config`, one of `configs`; empty for the full size."""
        if not self.size:
            return []
        seed = [f"train.seed={config.train.seed}"] if SEED_MARK in config.name else []
        return [f"name={config.name}", *self.size.overrides, *_of_ladder(config, self.size), *seed]


def make_plan(
    target: str, mode: str, smoke: bool, recipe: Path | None, seeds: int | None = None
) -> Plan:
    """Return the Plan with the models to train: `target`, such as `8.3b`, and the smaller ones, in
    full size or as twins. The argument `mode` decides: `full`, `scaled`, or `auto`, the full size
    if this machine's GPUs can train it and `smoke` is False. `smoke` asks for the smallest twins.
    `recipe`, a file, replaces the size's data recipe.

    Twins are trained with `seeds` seeds, by default as many as their size states, counting up from
    the recipe's own seed. Raises HardwareMissing if the full size is asked for and does not fit.
    Raises BadInput if the full size is asked for with `smoke`, or is chosen together with several
    seeds.
    """
    if smoke and mode == "full":
        raise BadInput(
            "--smoke trains small twins and --mode full the published size: leave one of the two"
            " out"
        )
    names = LADDER[: LADDER.index(target) + 1]
    published = tuple(read_run_config(model_file(name)) for name in names)
    possible, reason = _fits(published[-1])
    if mode == "full" and not possible:
        raise HardwareMissing(f"--mode full cannot run here, and --mode scaled can: {reason}")
    if mode == "full" or (mode == "auto" and possible and not smoke):
        if seeds and seeds > 1:
            raise BadInput(
                "--seeds is for twins, and the full size is trained once: leave it out or say"
                " --mode scaled"
            )
        return Plan(target, "full", reason, recipe or FULL_RECIPE, None, published, published)
    size = SMOKE if smoke else TWIN
    why = "asked for" if mode == "scaled" or smoke else reason
    twins = [read_run_config(model_file(name), size.overrides, twin=True) for name in names]
    configs = []
    seeds = seeds or size.seeds
    for further in range(seeds):
        for name, twin in zip(names, twins, strict=True):
            seed = twin.train.seed + further
            mark = f"{SEED_MARK}{seed}" if further else ""
            own = [f"name={name}-{size.suffix}{mark}", f"train.seed={seed}"]
            configs.append(override_config(twin, [*own, *_of_ladder(twin, size)]))
    return Plan(
        target, "scaled", why, recipe or size.recipe, size, published * seeds, tuple(configs)
    )


def model_name(training: str) -> str:
    """Return the name under which a reproduction keeps the training called `training`: its model's
    name, followed by the seed if it is not the recipe's own. `8.3b-twin-seed-2` becomes
    `8.3b-seed-2`."""
    return training.partition("-")[0] + "".join(training.partition(SEED_MARK)[1:])


def folder_of(training: str, runs: Path) -> Path:
    """Return the path of the folder that holds the directory of the training called `training`:
    `runs`/seeds if SEED_MARK is in that name, as it is for a training with another seed than the
    recipe's; else `runs`."""
    return runs / SEEDS if SEED_MARK in training else runs


def training_place(run: str, runs: Path) -> Path:
    """Return the path of the directory of a reproduction's training; `run` is that directory's
    name, `runs` the folder of runs. A training with another seed than the recipe's is at
    `runs`/seeds/`run`, any other at `runs`/`run`. Earlier versions kept every seed in `runs`, so if
    `runs`/`run` is a sealed directory, that is returned whatever its seed."""
    beside = runs / run
    return beside if is_sealed(beside) else folder_of(run, runs) / run


def _of_ladder(config: RunConfig, size: Size) -> list[str]:
    """Return a list of overrides, `key=value` texts, that give a twin of this size its learning
    rate by `RATE_RULE`, which a ladder of small models gave, and the standard deviation of its
    initial weights by its width. The final learning rate keeps its ratio to the peak.

    The list is empty for any size but `TWIN`: trainings of other sizes are too short for the rule.
    """
    if size is not TWIN:
        return []
    train = config.train
    rate = ladder_rate(config)
    least = float(f"{rate * train.min_learning_rate / train.learning_rate:.3g}")
    deviation = float(f"{initial_deviation(config.model.hidden_size):.6g}")
    return [
        f"train.learning_rate={rate}",
        f"train.min_learning_rate={least}",
        f"model.init_std={deviation}",
    ]


def ladder_rate(config: RunConfig) -> float:
    """Return the learning rate, a float of three digits, of the training `config` by `RATE_RULE`, a
    power law in its parameters and its tokens."""
    by_size = (parameter_count(config.model) / OF_PARAMETERS) ** BY_SIZE
    by_length = (tokens_trained(config.model, config.train) / OF_TOKENS) ** BY_LENGTH
    return float(f"{RATE * by_size * by_length:.3g}")


def twin_rule(config: RunConfig) -> str:
    """Return in words the rule that shrank the recipe `config`, with the ladder's rule if the
    recipe's learning rate is within 5 % of the one that the ladder's rule gives; empty if the
    recipe was not shrunk."""
    if not config.twin:
        return ""
    # The vocabulary, and so the rate, depends on the text.
    if not math.isclose(config.train.learning_rate, ladder_rate(config), rel_tol=0.05):
        return describe_scale(config.twin)
    return describe_scale(
        config.twin,
        f"the rate of the ladder's rule, {RATE_RULE}, for which five sizes were tried alike, so it"
        " favours none",
        kept="the initial deviation is 0.02 · √(1024 / width); ",
    )


def training_job(config: RunConfig, runs: Path, dataset: Path = Path()) -> Job:
    """Return the Job that trains the published model of the configuration `config` on one node,
    with as many ranks as `default_ranks` gives on this machine, from its shipped manifest, whose
    cluster and overrides are left out. `runs` is the folder of runs, `dataset` a directory. Only
    `355m`, `2.5b` and `8.3b` have a manifest; another name raises BadInput."""
    here = {
        "runs": runs,
        "dataset": dataset,
        "nodes": 1,
        "ranks_per_node": default_ranks(config),
        "cluster": "",
        "overrides": (),
    }
    return load_config(manifest_file(config.name), Job).model_copy(update=here)


def manifest_file(name: str) -> Path:
    """Return the path of the TOML file of the job that trains a published model, by the name of its
    configuration, on the paper's cluster. Only `355m`, `2.5b` and `8.3b` have such a file; for
    another name nothing lies at the path."""
    return HOME / "experiments" / "jobs" / f"{name}.toml"


def _fits(config: RunConfig) -> tuple[bool, str]:
    sizes = [gpu["memory_bytes"] for gpu in list_gpus()]
    tp = config.parallel.tp
    needed = fullest_rank(config.model, config.train, config.parallel).total
    wanted = f"{config.name} needs {tp} GPU{'s' if tp > 1 else ''} of {needed / 2**30:.0f} GiB"
    if not sizes:
        return False, f"there is no GPU, and {wanted}"
    there = f"there are {len(sizes)} of {min(sizes) / 2**30:.0f} GiB"
    return len(sizes) >= tp and min(sizes) >= needed, f"{wanted}; {there}"


def print_plan(plan: Plan) -> None:
    """Print to standard output the plan's mode, its reason and, for twins, their rule, then the
    cost of each model and of all: parameters, tokens, FLOPs, disk, expected time. Nothing is
    run."""
    print(f"mode: {plan.mode} ({plan.reason})")
    if plan.size:
        print(twin_rule(plan.configs[0]))
    print(
        f"{'model':<20}{'parameters':>15}{'tokens':>18}{'a parameter':>13}"
        f"{'FLOPs':>11}{'disk':>10}{'expected':>12}"
    )
    total_seconds = 0.0
    for config in plan.configs:
        seconds = _training_seconds(plan, config)
        total_seconds += seconds
        parameters = parameter_count(config.model)
        tokens = tokens_trained(config.model, config.train)
        print(
            f"{config.name:<20}{parameters:>15,}{tokens:>18,}{tokens / parameters:>13.2f}"
            f"{flops_per_iteration(config.model, config.train) * config.train.iterations:>11.2e}"
            f"{training_bytes(config) / 1e9:>7.2f} GB{format_days(seconds):>12}"
        )
    print(
        f"in all: about {format_days(total_seconds)} and"
        f" {sum(map(training_bytes, plan.configs)) / 1e9:.2f} GB of disk, besides the data",
        flush=True,
    )


def _training_seconds(plan: Plan, config: RunConfig) -> float:
    flops = flops_per_iteration(config.model, config.train) * config.train.iterations
    if plan.size is None:
        return flops / (FULL_EFFICIENCY_FLOPS * training_job(config, Path("runs")).ranks)
    start_up_seconds = 5.0
    return start_up_seconds + twin_seconds(flops, default_ranks(config))


def training_bytes(config: RunConfig) -> int:
    """Return the bytes of disk, an int, for all the checkpoints that the training `config` keeps at
    one time. While a checkpoint is written, there is one more on the disk, which does not count
    here."""
    return config.train.keep_checkpoints * checkpoint_bytes(config.model, config.train.precision)
