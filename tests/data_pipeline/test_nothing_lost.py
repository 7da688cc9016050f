"""A mistake, a race, an input that changes: nothing finished is removed, nothing wrong is
sealed."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.data_pipeline.pipeline import Pipeline
from mlm_repro.lineage.digest import check_seal
from mlm_repro.lineage.errors import BadInput, Interrupted
from mlm_repro.lineage.run import MANIFEST, RunDirectory
from tests.data_pipeline.builds import build, config_for, files_of, in_child, write_mixed
from tests.data_pipeline.test_resume import build_until


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return config_for(f"jsonl:{write_mixed(tmp_path, 60)}", "shard_bytes=65536")


def finished(root: Path) -> set[Path]:
    """The tasks that are done in a run's hidden folder."""
    return {path for path in root.rglob("DONE") if ".work" in path.parts}


def killed(config: DataConfig, folder: Path) -> Path:
    """A run that was killed when the order of its documents was to be drawn."""
    in_child(build_until, folder, config, "runs", "order")
    (run,) = [path for path in (folder / "runs").iterdir() if not path.is_symlink()]
    assert finished(run)
    return run


def test_a_mistake_removes_nothing_of_a_run_that_was_there(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = killed(config, tmp_path)
    done = finished(run)
    (run / "mine.txt").write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
        with pytest.raises(BadInput, match="free space"):
            build(tmp_path, config, "runs")
    assert finished(run) == done
    assert (run / "mine.txt").read_text() == "mine"
    (run / "mine.txt").unlink()
    assert files_of(build(tmp_path, config, "runs")) == files_of(build(tmp_path, config, "anew"))


def touch(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b"the", b"The", 1))


@pytest.mark.parametrize(
    ("happens", "said"),
    [(touch, "was changed while it was read"), (Path.unlink, "can no longer be read")],
)
def test_an_input_that_changes_or_goes_away_is_not_sealed(
    happens: Callable[[Path], object],
    said: str,
    config: DataConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus, kept = tmp_path / "corpus.jsonl", tmp_path / "kept"
    prepare = Pipeline._prepare

    def meanwhile(pipeline: Pipeline, shards: object) -> object:
        shutil.copy2(corpus, kept)
        happens(corpus)
        return prepare(pipeline, shards)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "_prepare", meanwhile)
        with pytest.raises(Interrupted, match=said):
            build(tmp_path, config, "runs")
    assert not list(tmp_path.rglob("COMPLETE"))
    shutil.copy2(kept, corpus)
    again = build(tmp_path, config, "runs")
    check_seal(again)
    assert files_of(again) == files_of(build(tmp_path, config, "anew"))


def begin(place: Path, number: int, barrier: Barrier) -> None:
    barrier.wait()
    with suppress(BadInput):
        RunDirectory.begin_at(place, "data-clean", {"number": number}, {})
        (place.parent / f"{place.name}-begun-{number}").touch()


def test_of_works_that_begin_at_once_in_one_place_one_has_it(tmp_path: Path) -> None:
    """Twenty races of four processes."""
    context = get_context("fork")
    for race in range(20):
        place, barrier = tmp_path / str(race), context.Barrier(4)
        processes = [
            context.Process(target=begin, args=(place, number, barrier)) for number in range(4)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        (winner,) = tmp_path.glob(f"{race}-begun-*")
        config = RunDirectory.open(place).manifest["config"]
        assert winner.name == f"{race}-begun-{config['number']}"
        assert [path.name for path in place.iterdir()] == [MANIFEST]
