"""Every configuration that is shipped loads, and says what it would do."""

import json
import re
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

import mlm_repro.data_pipeline.cli
import mlm_repro.engine.cli
from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.run.resolved import read_run_config
from mlm_repro.lineage.config import load_config
from tests.architecture.rooms import ROOT, source_files

MODEL_FOLDER = ROOT / "experiments" / "models"
MODELS = sorted(MODEL_FOLDER.rglob("*.toml"))
# Looked at in tests/experiments/simulator.
CLUSTERS = sorted((ROOT / "experiments" / "clusters").rglob("*.toml"))
SOFTWARE = sorted((ROOT / "experiments" / "software").rglob("*.toml"))  # as these
# Looked at in tests/experiments/test_catalogue.py.
EXPERIMENTS = sorted((ROOT / "experiments").glob("*/*/ex*.toml"))
# Looked at in tests/experiments/test_verdicts.py.
UNANSWERED = ROOT / "experiments" / "unanswered.toml"
# Looked at in tests/experiments/launch.
JOBS = sorted((ROOT / "experiments" / "jobs").glob("*.toml"))
MEGATRON_FLAGS = ROOT / "engine" / "megatron_flags.toml"  # in tests/engine
# Tests/verify, engine.
NAME_MAPS = {
    *ROOT.glob("engine/compare/names/*.toml"),
    *ROOT.glob("engine/formats/*.toml"),
}
LABELS = {ROOT / "reports" / name for name in ("axes.toml", "style.toml")}  # in tests/reports
PUBLISHED = ROOT / "data_pipeline" / "contamination" / "published.toml"  # in tests/data_pipeline
FITTED = ROOT / "benchmarks" / "fitted.toml"  # in tests/experiments/simulator
SMALL = ROOT / "verify" / "small.toml"  # in tests/verify
FIXES = ROOT / "benchmarks" / "fixes.toml"  # in tests/benchmarks
# In tests/experiments/test_catalogue.py.
ABOUT_CLAIMS = sorted((ROOT / "experiments" / "claims").glob("*.toml"))
# In tests/experiments/test_measured.py.
RELEASED = ROOT / "experiments" / "measured" / "released.toml"
SEEDS = ROOT / "docs" / "hooks" / "seeds.toml"  # in tests/docs
PROTOCOLS = sorted((ROOT / "evaluation").glob("*/pro*.toml"))  # in tests/evaluation
RECIPES = sorted((ROOT / "data_pipeline" / "recipes").glob("*.toml"))


def answer(app: Typer, *arguments: str) -> str:
    """What a command prints; it must succeed, and leave nothing behind."""
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, re.sub(r"(?m)^(cost|no cost|warning): .*\n", "", done.stderr)) == (
        0,
        "",
    )
    return done.stdout


def names(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


def test_every_configuration_is_looked_at_here() -> None:
    tests_own = {
        path for path in source_files() if path.relative_to(ROOT).parts[0] in ("tests", "results")
    }
    shipped = (
        {path for path in source_files() if path.suffix == ".toml"}
        - tests_own
        - {ROOT / "pyproject.toml"}
    )
    assert shipped == {
        *MODELS,
        *RECIPES,
        *CLUSTERS,
        *SOFTWARE,
        *EXPERIMENTS,
        *JOBS,
        UNANSWERED,
        MEGATRON_FLAGS,
        *NAME_MAPS,
        *LABELS,
        PUBLISHED,
        RELEASED,
        SEEDS,
        FITTED,
        FIXES,
        SMALL,
        *ABOUT_CLAIMS,
        *PROTOCOLS,
    }
    assert len(MODELS) == 21
    assert len(RECIPES) >= 4


@pytest.mark.parametrize("path", MODELS, ids=names(MODELS))
def test_a_model_loads_and_has_a_twin(path: Path) -> None:
    config, twin = load_config(path, RunConfig), read_run_config(path, twin=True)
    assert config.name == path.relative_to(MODEL_FOLDER).with_suffix("").as_posix().replace(
        "/", "-"
    )
    assert config.twin is None
    assert twin.twin is not None
    assert twin.twin.hidden_size * twin.model.hidden_size == config.model.hidden_size
    assert twin.parallel.tp == 1


@pytest.mark.parametrize("path", MODELS, ids=names(MODELS))
@pytest.mark.parametrize("options", [[], ["--twin"]], ids=["published", "twin"])
def test_a_model_is_planned_and_not_run(path: Path, options: list[str], tmp_path: Path) -> None:
    text = answer(
        mlm_repro.engine.cli.app, "run", str(path), *options, "--dry-run", "--runs", str(tmp_path)
    )
    config = json.loads(text[: text.index("\n}\n") + 2])
    assert RunConfig.model_validate(config).name.removesuffix("-twin").endswith(path.stem)
    for line in ("config digest", "parameters", "tokens", "FLOPs", "memory per rank", "checkpoint"):
        assert line in text[text.index("\n}\n") :]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", RECIPES, ids=names(RECIPES))
def test_a_recipe_is_planned_and_not_run(path: Path, tmp_path: Path) -> None:
    text = answer(
        mlm_repro.data_pipeline.cli.app, "run", str(path), "--dry-run", "--runs", str(tmp_path)
    )
    recipe, digest = text.rsplit("digest ", 1)
    assert DataConfig.model_validate(json.loads(recipe)) == load_config(path, DataConfig)
    assert len(digest.strip()) == 64
    assert list(tmp_path.iterdir()) == []
