"""From a verb to every matrix product is a path through at most eight files."""

import traceback
from pathlib import Path

import pytest

from mlm_repro.engine import cli as engine_cli
from mlm_repro.engine.parallel import layers
from mlm_repro.evaluation import cli as evaluation_cli
from mlm_repro.evaluation.tasks.documents import RunningText
from tests.architecture.rooms import ROOT
from tests.engine.conftest import write_dataset
from tests.engine.small_run import write_toml
from tests.evaluation.conftest import made_passes_for_published as made_passes_for_published
from tests.evaluation.conftest import run as run

LONGEST = 8
Paths = dict[tuple[str, ...], None]


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> Paths:
    """Files of ours on the call stack at each matrix product of a forward pass, the verb's file
    first."""
    product, stacks = layers.linear, Paths()

    def noted(*arguments: object) -> object:
        files = [Path(frame.filename) for frame in traceback.extract_stack()]
        ours = [str(file.relative_to(ROOT)) for file in files if file.is_relative_to(ROOT)]
        stacks[
            tuple(dict.fromkeys(file for file in ours if not file.startswith((".venv", "tests"))))
        ] = None
        return product(*arguments)

    monkeypatch.setattr(layers, "linear", noted)
    return stacks


def test_training(paths: Paths, tmp_path: Path) -> None:
    toml = write_toml(
        tmp_path / "small.toml",
        write_dataset(tmp_path / "dataset"),
        iterations=2,
        warmup_iterations=1,
    )
    engine_cli.run(toml, runs=tmp_path / "runs", ranks=1)
    assert_short(paths, "engine/cli.py")


def test_evaluation(
    paths: Paths,
    run: Path,
    made_passes_for_published: RunningText,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    evaluation_cli.run("wikitext103", run, limit=1, scoring=["workers=1"])
    assert_short(paths, "evaluation/cli.py")


def assert_short(paths: Paths, verb: str) -> None:
    assert any(path[-1] == "engine/parallel/layers.py" for path in paths)
    for path in paths:
        assert path[0] == verb
        assert len(path) <= LONGEST, path
