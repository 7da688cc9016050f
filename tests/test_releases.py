"""A release of this package, a key with a default and a file with a filter end nobody's run and
move no digest."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.run.resolved import SCHEMA
from mlm_repro.experiments import sealed
from mlm_repro.experiments.catalogue import Experiment
from mlm_repro.lineage.chain import broken_links
from mlm_repro.lineage.errors import Interrupted
from mlm_repro.lineage.files import Manifest, read_document
from mlm_repro.lineage.run import MANIFEST
from tests.architecture.rooms import PACKAGE, ROOMS, ROOT
from tests.engine.conftest import write_dataset
from tests.engine.small_run import small_config, train

DEFAULTS = Path(__file__).with_name("defaults.json")
MODELS = sorted((ROOT / "experiments" / "models").rglob("*.toml"))
RECIPES = sorted((ROOT / "data_pipeline" / "recipes").glob("*.toml"))
FILTER = re.search(
    r'```python title="data_pipeline/stages/\w+\.py"\n(.*?)```',
    (ROOT / "docs" / "extend" / "stage.md").read_text(encoding="utf-8"),
    re.DOTALL,
)


def another_release(copy: Path) -> None:
    """Version 0.1.1."""
    path = copy / "lineage" / "__init__.py"
    text = path.read_text(encoding="utf-8")
    assert 'installed("mlm-repro") or "0+unknown"' in text
    path.write_text(
        text.replace('installed("mlm-repro") or "0+unknown"', '"0.1.1"'), encoding="utf-8"
    )


def a_key_in_every_section(copy: Path) -> None:
    """A key with a default in every section of every configuration."""
    changed = 0
    for name in ("engine/config.py", "data_pipeline/config.py", "data_pipeline/reading/config.py"):
        path = copy / name
        text, count = re.subn(
            r'(^class \w+\((?:\w*Config|FamilySection)\):\n    """.*?"""\n)',
            r"\1    brand_new: int = 3\n",
            path.read_text(encoding="utf-8"),
            flags=re.DOTALL | re.MULTILINE,
        )
        path.write_text(text, encoding="utf-8")
        changed += count
    assert changed > 12


def a_filter(copy: Path) -> None:
    """The filter of the documentation's example."""
    assert FILTER
    (copy / "data_pipeline" / "stages" / "letters.py").write_text(FILTER[1], encoding="utf-8")


Change = Callable[[Path], None]
CHANGES = [another_release, a_key_in_every_section, a_filter]


def later(folder: Path, change: Change) -> Path:
    """A copy of the package after a change; its folder goes on the path of a program."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    change(folder)
    (folder / "sources").mkdir()
    (folder / "sources" / PACKAGE).symlink_to(folder)
    return folder / "sources"


def call(
    path: Path | None, script: str, *words: object, folder: Path = ROOT
) -> tuple[int, str, str]:
    """Run a Python script with the package that lies in a folder, by default the one that is
    tested."""
    variables = os.environ | ({"PYTHONPATH": str(path)} if path else {}) | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", "-c", script, *map(str, words)]
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=600
    )
    return done.returncode, done.stdout, done.stderr


DIGESTS = f"""
import sys
from pathlib import Path
from {PACKAGE}.lineage.digest import sha256_json
from {PACKAGE}.lineage.config import load_config
from {PACKAGE}.data_pipeline.config import DataConfig
from {PACKAGE}.engine.run.resolved import read_run
for name in sys.argv[1:]:
    if "recipes" in name:
        print(sha256_json(load_config(Path(name), DataConfig).identity()))
    else:
        described = read_run(name, ["data={{}}"], ranks=None).describe()
        print(described.partition("config digest")[2].split()[0])
"""
RESUME = f"from {PACKAGE}.engine.cli import main; main()"


def digests(path: Path | None) -> list[str]:
    """What a dry run of every shipped recipe prints as its digest."""
    code, out, err = call(path, DIGESTS, *(file.relative_to(ROOT) for file in (*MODELS, *RECIPES)))
    assert code == 0, err
    return out.split()


@pytest.mark.parametrize("change", CHANGES)
def test_no_shipped_recipe_gets_another_digest(change: Change, tmp_path: Path) -> None:
    before = digests(None)
    assert len({*before}) == len(MODELS) + len(RECIPES)
    assert digests(later(tmp_path, change)) == before


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, and a run on it that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    train(small_config(write_dataset(folder / "dataset")), folder / "runs")
    return folder


def final_weights(run: Path) -> dict[str, Any]:
    newest = max(run.glob("checkpoints/iter_*"))
    return {
        name: value
        for path in newest.glob("*.safetensors")
        for name, value in load_file(path).items()
    }


@pytest.mark.parametrize("change", CHANGES)
def test_a_training_goes_on_in_its_directory_bit_for_bit(
    change: Change, whole: Path, tmp_path: Path
) -> None:
    with pytest.raises(Interrupted):
        train(small_config(whole / "dataset"), tmp_path / "runs", until=40)
    (run,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    code, _, err = call(later(tmp_path / "later", change), RESUME, "resume", run, "--ranks", 1)
    assert (code, "20 iterations" in err) == (0, True), err
    assert "was last worked on under mlm-repro " in err
    assert ("and here is mlm-repro 0.1.1" in err) == (change is another_release)
    manifest = read_document(run / MANIFEST, Manifest)
    assert [attempt.iteration for attempt in manifest.attempts] == [0, 40]
    assert manifest.attempts[0].code != manifest.attempts[1].code
    assert [path.name for path in (tmp_path / "runs").iterdir() if not path.is_symlink()] == [
        run.name
    ]
    (uninterrupted,) = (whole / "runs").glob("small-*")
    expected, found = final_weights(uninterrupted), final_weights(run)
    assert found.keys() == expected.keys()
    assert all((found[name] == value).all() for name, value in expected.items())
    assert broken_links(run) == []


def test_the_same_work_is_found_again_after_all_of_them(whole: Path, tmp_path: Path) -> None:
    def everything(copy: Path) -> None:
        for change in CHANGES:
            change(copy)

    (run,) = (whole / "runs").glob("small-*")
    toml = tmp_path / "small.toml"
    values = json.loads((run / "manifest.json").read_text(encoding="utf-8"))["config"]
    lines = ['name = "small"']
    for section in ("model", "train", "data"):
        kept = {
            key: value
            for key, value in values[section].items()
            if isinstance(value, int | float | str)
        }
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in kept.items())]
    toml.write_text("\n".join(lines), encoding="utf-8")
    words = ("run", toml, "--ranks", 1, "--runs", whole / "runs")
    code, out, err = call(later(tmp_path / "later", everything), RESUME, *words)
    assert (code, out) == (0, f"already complete: {run}\n"), err
    assert "was last worked on under mlm-repro " in err


def test_a_run_of_other_code_is_refused_if_so_asked(whole: Path, tmp_path: Path) -> None:
    (run,) = (whole / "runs").glob("small-*")
    code, _, err = call(
        later(tmp_path / "later", another_release),
        RESUME,
        "resume",
        run,
        "--ranks",
        1,
        "--same-code",
    )
    assert (code, "--same-code" in err) == (2, True), err
    assert call(None, RESUME, "resume", run, "--ranks", 1, "--same-code")[0] == 0


def defaults() -> dict[str, Any]:
    """What each kind's schema takes for granted: the default of every key, by its section."""
    models = {
        "training": (SCHEMA, RunConfig),
        "data": (1, DataConfig),
        "experiment": (sealed.SCHEMA, Experiment),
    }
    found: dict[str, Any] = {}
    for kind, (schema, model) in models.items():
        sections = {model.__name__: model.model_json_schema()}
        sections |= sections[model.__name__].pop("$defs", {})
        found[kind] = {"schema": schema} | {
            f"{section}.{key}": about["default"]
            for section, described in sorted(sections.items())
            for key, about in described.get("properties", {}).items()
            if "default" in about and not isinstance(about["default"], dict)
        }
    return found


def test_a_default_that_changes_moves_the_version_of_its_schema() -> None:
    """A kept default that is another now needs a new version; `python -m tests.test_releases` keeps
    a new key's."""
    kept = json.loads(DEFAULTS.read_text(encoding="utf-8"))
    for kind, now in defaults().items():
        if now["schema"] == kept[kind]["schema"]:
            changed = {
                key: (value, now.get(key))
                for key, value in kept[kind].items()
                if now.get(key) != value
            }
            assert changed == {}, f"raise the version of the schema of {kind}"
    assert kept == defaults(), "keep the new keys' defaults: python -m tests.test_releases"


if __name__ == "__main__":
    DEFAULTS.write_text(json.dumps(defaults(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
