"""The inputs of a run are found by digest: what its configuration calls them may lead elsewhere by
now."""

from pathlib import Path

import pytest

from mlm_repro.engine.run.resolved import resolve_begun
from mlm_repro.engine.train import train as train_resolved
from mlm_repro.lineage.digest import is_sealed
from mlm_repro.lineage.errors import IntegrityFailure, Interrupted
from mlm_repro.lineage.run import RunDirectory
from mlm_repro.verify.recomputed import RunCheck
from mlm_repro.verify.replay import replay
from tests.engine.conftest import write_dataset
from tests.engine.small_run import resolved, small_config, train


def build(folder: Path, name: str, seed: int) -> Path:
    """A dataset beside the link that leads to the newest one, as `mlm-data run` leaves them."""
    made = write_dataset(folder / name, seed)
    (folder / "d").unlink(missing_ok=True)
    (folder / "d").symlink_to(name)
    return made


@pytest.mark.parametrize("blended", [False, True])
def test_a_training_resumes_after_its_dataset_was_built_anew(blended: bool, tmp_path: Path) -> None:
    first = build(tmp_path, "d-1", 0)
    other = write_dataset(tmp_path / "e", 0) if blended else None
    config = small_config(tmp_path / "d", iterations=20, checkpoint_interval=10)
    if other:
        blend = config.data.model_copy(update={"dataset": ((tmp_path / "d", 1.0), (other, 3.0))})
        config = config.model_copy(update={"data": blend})
    with pytest.raises(Interrupted):
        train(config, tmp_path / "runs", until=10)
    (run,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    build(tmp_path, "d-2", 1)
    found = resolve_begun(RunDirectory.open(run))
    assert [place.resolve() for place in found.data.directories] == [
        first,
        *([other] if other else []),
    ]
    assert found.data.weights == ((0.25, 0.75) if blended else (1.0,))
    done = train_resolved(found, tmp_path / "runs").path
    assert done == run
    assert is_sealed(run)
    assert [each for each in RunCheck(run).broken if "was not made of" in each] == []
    replay(run, 1)


def test_a_dataset_that_is_nowhere_is_no_other_one(tmp_path: Path) -> None:
    first = build(tmp_path, "d-1", 0)
    run = train(small_config(tmp_path / "d", iterations=8), tmp_path / "runs").path
    build(tmp_path, "d-2", 1)
    (tmp_path / "elsewhere").mkdir()
    first.rename(tmp_path / "elsewhere" / "d-1")
    with pytest.raises(IntegrityFailure, match="is not the one that"):
        resolve_begun(RunDirectory.open(run))
    assert [each for each in RunCheck(run).broken if "was not made of" in each]


def test_a_run_starts_from_the_weights_that_it_began_with(tmp_path: Path) -> None:
    """Its name for them leads to a longer training by now."""
    data, runs = write_dataset(tmp_path / "data"), tmp_path / "runs"
    started = train(small_config(data, iterations=8), runs).path
    begun = small_config(data, iterations=9, init_from=str(runs / "small")).model_copy(
        update={"name": "second"}
    )
    directory = resolved(begun).begin(runs)
    assert (
        train(small_config(data, iterations=10), runs).path == (runs / "small").resolve() != started
    )
    origin = resolve_begun(directory).origin
    assert origin
    assert origin.place.resolve() == started
