"""Shipped files are found by short name and by their path in a clone; a file that is there comes
first."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from mlm_repro.lineage import environment, shipped
from mlm_repro.lineage.config import load_config
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.shipped import HOME, Shipped, find_file, wheel_state


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_shipped_file_has_both_names() -> None:
    for kind in Shipped:
        folder, suffix = kind.split("*")[0], kind.split("*")[-1].removeprefix("-runs")
        paths = sorted(HOME.glob(kind))
        assert paths
        for path in paths:
            place = path.relative_to(HOME).as_posix()
            assert find_file(place, kind) == path
            assert find_file(place.removeprefix(folder).removesuffix(suffix), kind) == path


def test_a_file_that_is_there_comes_first_and_a_folder_does_not() -> None:
    Path("8.3b").mkdir()
    assert find_file(Path("8.3b"), Shipped.MODEL) == HOME / "experiments" / "models" / "8.3b.toml"
    for own in ("355m", "experiments/models/355m.toml"):
        Path(own).parent.mkdir(parents=True, exist_ok=True)
        Path(own).touch()
        assert find_file(own, Shipped.MODEL) == Path(own)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        (
            "8.3c",
            Shipped.MODEL,
            ("there is no model '8.3c' (did you mean '8.3b'?)", "ptd-p/1008b", ".toml files"),
        ),
        ("experiments/models/8.3c.toml", Shipped.MODEL, ("(did you mean '8.3b'?)",)),
        ("8.3b.toml", Shipped.MODEL, ("there is no model '8.3b.toml' (did you mean '8.3b'?)",)),
        ("145.6b", Shipped.MODEL, ("(did you mean 'ptd-p/145.6b'?)",)),
        ("experiments/jobs/8.3b.toml", Shipped.MODEL, ("there is no model",)),
        ("../models/8.3b", Shipped.MODEL, ("there is no model",)),
        ("twim", Shipped.RECIPE, ("there is no recipe 'twim' (did you mean 'twin'?)",)),
        ("", Shipped.JOB, ("there is no job ''; there are 2.5b, 355m, 8.3b",)),
        ("fitted/dgx-2h-v100", Shipped.CLUSTER, ("there is no cluster",)),
        (
            "ptd-runs",
            Shipped.WORKLOAD_FILE,
            ("no workload file 'ptd-runs' (did you mean 'ptd-p-runs'?)", ".csv files"),
        ),
        ("x" * 5000, Shipped.MODEL, ("there is no model",)),
        ("a\0b", Shipped.MODEL, ("there is no model",)),
    ],
)
def test_a_name_of_nothing_gets_the_nearest_one(
    name: str, kind: Shipped, words: tuple[str, ...]
) -> None:
    with pytest.raises(BadInput) as found:
        find_file(name, kind)
    assert all(part in str(found.value) for part in words), str(found.value)


def test_an_installation_without_them_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "HOME", tmp_path)
    with pytest.raises(
        IntegrityFailure, match="experiments/models is missing from this installation: install"
    ):
        find_file("8.3b", Shipped.MODEL)


def test_a_file_extends_a_shipped_one_from_anywhere() -> None:
    class Named(BaseModel):
        title: str
        precision: str

    Path("mine.toml").write_text(
        'extends = "experiments/clusters/h100.toml"\ntitle = "mine"\n', encoding="utf-8"
    )
    found = load_config(Path("mine.toml"), Named)
    assert (found.title, found.precision) == ("mine", "bf16")


def test_a_build_stands_for_the_commit_and_another_has_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "HOME", tmp_path / "mlm_repro")
    monkeypatch.setattr(environment, "HOME", tmp_path / "mlm_repro")
    record = tmp_path / "mlm_repro-9.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("lineage/errors.py,sha256=abc,3\n", encoding="utf-8")
    build = environment.source_state()["commit"]
    assert (build.startswith("wheel-"), len(build)) == (True, 40)
    record.write_text("lineage/errors.py,sha256=abd,3\n", encoding="utf-8")
    assert wheel_state()["commit"] != build
