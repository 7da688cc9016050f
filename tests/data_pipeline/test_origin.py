"""A dataset's identity, and that of each task, has the code that made it and the libraries that
this calls."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlm_repro.data_pipeline.work import origin
from mlm_repro.data_pipeline.work.origin import LIBRARIES, made_by
from mlm_repro.data_pipeline.work.tasks import WorkTask
from tests.data_pipeline.builds import build, config_for, files_of, in_child
from tests.data_pipeline.conftest import sentences, write_jsonl
from tests.data_pipeline.copies import change, copy_of_package
from tests.data_pipeline.test_resume import build_until


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the package, whose code is the one that counts."""
    monkeypatch.setattr(origin, "HOME", copy_of_package(tmp_path / "copy"))
    made_by.cache_clear()
    yield tmp_path / "copy"
    made_by.cache_clear()


def moved(before: dict[str, str]) -> set[str]:
    """What counts otherwise than before."""
    made_by.cache_clear()
    return {key for key, value in made_by().items() if before[key] != value}


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("data_pipeline/stages/length.py", "tokens >= self.min_tokens", "tokens > self.min_tokens"),
        (
            "data_pipeline/duplicates/near_duplicates.py",
            "MOST_COMPARED = 1000",
            "MOST_COMPARED = 1001",
        ),
        ("lineage/atomic.py", "json.loads(text, obj", "json.loads(text, parse_constant=None, obj"),
    ],
)
def test_an_edit_of_code_counts(file: str, old: str, new: str, copy: Path) -> None:
    before = made_by()
    assert moved(before) == set()
    change(copy / file, old, new)
    assert moved(before) == {"code"}


@pytest.mark.parametrize("name", LIBRARIES)
def test_another_version_of_a_library_counts(
    name: str, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = made_by()
    about = tmp_path / f"libraries/{name}-99.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.1\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path / "libraries")
    assert moved(before) == {name}
    assert made_by()[name] == "99.1"


def test_other_code_makes_another_dataset_and_no_task_of_the_last_build_is_taken(
    copy: Path, tmp_path: Path
) -> None:
    config = config_for(
        f"jsonl:{write_jsonl(tmp_path / 'a.jsonl', [sentences(40, seed) for seed in range(30)])}",
        "decontaminate.test_sets=[]",
    )
    first = build(tmp_path, config, "runs")
    assert build(tmp_path, config, "runs") == first
    kept = [*tmp_path.glob("runs/.stages/small/prepare/*/DONE")]
    before = [path.stat().st_mtime_ns for path in kept]
    assert before
    change(
        copy / "data_pipeline/stages/length.py",
        "tokens >= self.min_tokens",
        "tokens > self.min_tokens - 1",
    )
    made_by.cache_clear()
    second = build(tmp_path, config, "runs")
    assert second != first
    assert files_of(second) == files_of(first)
    assert not {*before} & {path.stat().st_mtime_ns for path in kept}


def test_unfinished_work_of_other_code_is_named(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = f"jsonl:{write_jsonl(tmp_path / 'a.jsonl', [sentences(40, n) for n in range(30)])}"
    config = config_for(source, "decontaminate.test_sets=[]")
    assert os.WIFSIGNALED(in_child(build_until, tmp_path, config, "runs", "order"))
    other = config_for(source, "decontaminate.test_sets=[]", "split.train=4")
    assert os.WIFSIGNALED(in_child(build_until, tmp_path, other, "runs", "order"))
    left = [path for path in tmp_path.glob("runs/small-*") if (path / ".work/measure").is_dir()]
    assert len(left) == 2
    assert "unfinished work" not in capsys.readouterr().err
    change(
        copy / "data_pipeline/stages/length.py",
        "tokens >= self.min_tokens",
        "tokens > self.min_tokens - 1",
    )
    made_by.cache_clear()
    build(tmp_path, config, "runs")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "unfinished work" in line]
    (named,) = [path for path in left if str(path) in line]
    assert json.loads((named / "manifest.json").read_text())["settings"] == config.identity()
    assert "begun with another code: remove that folder, or go on there" in line
    assert "under mlm-repro 0." in line
    assert (named / ".work/measure").is_dir()
    shutil.rmtree(named)
    build(tmp_path, config, "runs")
    assert "unfinished work" not in capsys.readouterr().err


def test_a_task_is_its_work_settings_input_and_code(copy: Path, tmp_path: Path) -> None:
    def digest(**settings: object) -> str:
        return WorkTask(sorted, settings, (), tmp_path / "work/stage/00000").digest  # type: ignore[arg-type]

    before = digest(a=1)
    assert digest(a=1) == before
    assert digest(a=2) != before
    change(
        copy / "data_pipeline/stages/length.py",
        "tokens >= self.min_tokens",
        "tokens > self.min_tokens",
    )
    made_by.cache_clear()
    assert digest(a=1) != before
