"""Trains one recipe at every combination of some settings and compares the validation losses.
Imports no torch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product, starmap
from pathlib import Path
from statistics import fmean

from mlm_repro.engine.run.files import read_summary
from mlm_repro.engine.run.resolved import read_run
from mlm_repro.experiments.reproduce.steps import StepFailed, run_step
from mlm_repro.experiments.scores import LEVEL, paired_reach
from mlm_repro.lineage.errors import BadInput, Diverged

SEED = "train.seed"


@dataclass(frozen=True)
class SweptRecipe:
    """One combination of settings other than the seed, texts `key=value`, with its final validation
    loss for each trained seed: a dict from the seed's setting, such as `train.seed=1`, to the loss,
    or to None for a training that diverged."""

    settings: tuple[str, ...]
    losses: dict[str, float | None]
    """Final validation loss in nats per token, by the setting of the seed, such as `train.seed=1`,
    which is empty if the seed does not vary; None for a training that diverged. Seeds that are not
    trained yet are missing."""

    @property
    def mean(self) -> float:
        """Mean loss over the seeds, in nats per token; infinite if a training diverged or none is
        complete."""
        losses = [math.inf if loss is None else loss for loss in self.losses.values()]
        return sum(losses) / len(losses) if losses else math.inf


def combinations(vary: Sequence[str]) -> list[tuple[str, ...]]:
    """Return a list of every combination of the values in texts such as
    `["train.learning_rate=1e-3,3e-3", "train.seed=1,2"]`, each a tuple of `key=value` words for
    `--set`, a word for each text. The last text's value changes first. Without texts there is one
    combination, of no words.

    Raises BadInput for a text without values or a key that is named twice.
    """
    axes = {}
    for text in vary:
        key, _, values = text.partition("=")
        if not values or key in axes:
            raise BadInput(
                f"--vary {text}: give each key once, with its values, as"
                " train.learning_rate=1e-3,3e-3"
            )
        axes[key] = [f"{key}={value}" for value in values.split(",")]
    return list(product(*axes.values()))


def sweep(
    recipe: str, vary: Sequence[str], fixed: Sequence[str], runs: Path, part: tuple[int, int]
) -> list[SweptRecipe]:
    """Train `recipe`, the name of a shipped model or of a TOML file, at the combinations of the
    values in `vary`, a text `KEY=VALUE,VALUE` for each key, that are not complete below the folder
    `runs`, one after the other, each with `mlm-train`; `fixed` has overrides `KEY=VALUE` for all.
    `part` is (I, N): only every Nth combination is trained, from the Ith on, counted from 1.

    Returns a list with a SweptRecipe, settings and losses by seed, for each combination without its
    seed, the lowest mean loss first; complete trainings of other parts count. A training of this
    part that diverges is a result, and makes the mean loss of its combination infinite; one of
    another part counts as not trained. Combinations with an infinite mean, or without a complete
    training, come last. Raises BadInput for a recipe or a setting that cannot be trained or has no
    dataset with a validation split, and DataMissing or IntegrityFailure for its dataset, before the
    first training, and StepFailed for a training that fails otherwise or is stopped.
    """
    trainings = [(words, read_run(recipe, [*fixed, *words])) for words in combinations(vary)]
    for _, run in trainings:
        run.check_validation()
    directories = {words: run.directory(runs) for words, run in trainings}
    diverged = set()
    for words, directory in [*directories.items()][part[0] - 1 :: part[1]]:
        if not directory.is_complete:
            try:
                settings = []
                for override in (*fixed, *words):
                    settings += ["--set", override]
                run_step("mlm-train", "run", recipe, *settings, "--runs", str(runs))
            except StepFailed as failed:
                if failed.exit_code != Diverged.exit_code:
                    raise
                diverged.add(words)
    swept: dict[tuple[str, ...], dict[str, float | None]] = {}
    for words, directory in directories.items():
        seed = next((word for word in words if word.startswith(f"{SEED}=")), "")
        losses = swept.setdefault(tuple(word for word in words if word != seed), {})
        if words in diverged:
            losses[seed] = None
        elif directory.is_complete:
            losses[seed] = read_summary(directory.path).validation_loss
    return sorted(
        starmap(SweptRecipe, swept.items()),
        key=lambda result: result.mean,
    )


def format_swept(swept: Sequence[SweptRecipe]) -> Iterator[str]:
    """Yield a line for each recipe of `swept`, in the order given, which must be the order of
    `sweep`, the lowest mean loss first: its mean loss, and its difference from the first recipe
    over the seeds that both have, with a paired t interval if these are several. The line says
    instead if a training of the recipe diverged, or no training of it is complete yet."""
    best = swept[0]
    for recipe in swept:
        losses = [loss for loss in recipe.losses.values() if loss is not None]
        words = " ".join(recipe.settings) or "the recipe"
        if len(losses) < len(recipe.losses) or not losses:
            yield f"{words}: {'diverged' if recipe.losses else 'not trained yet'}"
            continue
        line = (
            f"{words}: validation loss {recipe.mean:.4f} over {len(losses)}"
            f" seed{'s' * (len(losses) > 1)}"
        )
        others = {} if recipe is best else best.losses
        gaps = [
            loss - other
            for seed, loss in recipe.losses.items()
            if loss is not None and (other := others.get(seed)) is not None
        ]
        if len(gaps) > 1:
            beside = f"{fmean(gaps):+.4f} ± {paired_reach(gaps, LEVEL):.4f} beside the best"
            line += f", {beside} ({LEVEL:.0%}, paired seeds)"
        elif gaps:
            line += f", {gaps[0]:+.4f} beside the best: give several seeds for an interval"
        yield line
