"""Many trainings of one recipe from one command: a table with paired intervals, the best as a
recipe, parts of it."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.run.files import read_summary
from mlm_repro.engine.run.resolved import read_run
from mlm_repro.lineage.config import load_config
from tests.commands import Outcome, call
from tests.engine.conftest import write_dataset
from tests.engine.small_run import write_toml

VARY = "train.learning_rate=1e-3,3e-3,1e9", "train.seed=1,2,3"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dataset = write_dataset(tmp_path_factory.mktemp("dataset"))
    return write_toml(
        tmp_path_factory.mktemp("recipe") / "small.toml",
        dataset,
        iterations=12,
        validation_interval=12,
    )


def sweep(recipe: Path, *words: object, vary: tuple[str, ...] = VARY, ends: int = 0) -> Outcome:
    axes = [word for text in vary for word in ("--vary", text)]
    return call({}, "mlm-experiment", "sweep", recipe, *axes, *words, ends=ends)


def test_the_table_has_the_trainings_losses_and_the_best_is_a_recipe(
    recipe: Path, tmp_path: Path
) -> None:
    """Two tasks divide the work; a third call trains nothing and prints what both made."""
    runs = ("--runs", tmp_path / "runs")
    first = sweep(recipe, *runs, "--part", "1/2", "--quiet")
    assert "not trained yet" in first.out or first.out.count("over 3 seeds") == 0
    sweep(recipe, *runs, "--part", "2/2", "--quiet")
    done = sweep(recipe, *runs, "--best", tmp_path / "best.toml", "--quiet")
    lines = done.out.splitlines()

    def losses(rate: str) -> np.ndarray:
        settings = [[f"train.learning_rate={rate}", f"train.seed={seed}"] for seed in (1, 2, 3)]
        paths = [read_run(recipe, words).directory(tmp_path / "runs").path for words in settings]
        return np.array([read_summary(path).validation_loss for path in paths])

    slow, fast = losses("1e-3"), losses("3e-3")
    apart = slow - fast
    assert apart.mean() > 0
    reach = stats.t.interval(0.95, 2, scale=stats.sem(apart))[1]
    assert lines[0] == f"train.learning_rate=3e-3: validation loss {fast.mean():.4f} over 3 seeds"
    assert (
        lines[1] == f"train.learning_rate=1e-3: validation loss {slow.mean():.4f} over 3 seeds,"
        f" {apart.mean():+.4f} ± {reach:.4f} beside the best (95%, paired seeds)"
    )
    assert lines[2] == "train.learning_rate=1e9: diverged"
    assert load_config(tmp_path / "best.toml", RunConfig).train.learning_rate == 3e-3
    assert not math.isnan(reach)


@pytest.mark.parametrize(
    ("vary", "words", "said"),
    [
        (
            ("train.lr=1,2",),
            (),
            "unknown key 'train.lr'; this program's key is train.learning_rate",
        ),
        (("train.seed",), (), "--vary train.seed: give each key once, with its values"),
        (("train.seed=1", "train.seed=2"), (), "--vary train.seed=2: give each key once"),
        (
            ("train.seed=1",),
            ("--part", "3/2"),
            "--part 3/2 is not I/N with I from 1 to N: ",
        ),
        (
            ("model.seq_length=16,6000",),
            (),
            "validation split has 5442 tokens, and one sequence needs 6000 + 1",
        ),
    ],
)
def test_a_sweep_that_cannot_be_trained_is_refused_before_the_first_training(
    vary: tuple[str, ...], words: tuple[str, ...], said: str, recipe: Path, tmp_path: Path
) -> None:
    refused = sweep(recipe, "--runs", tmp_path / "runs", *words, vary=vary, ends=2)
    assert re.sub(r"\n", "", refused.error).find(said) >= 0
    assert not (tmp_path / "runs").exists()
