"""Faults struck at random points of a reproduction are survived, and one that is not is found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.rooms import ROOT
from tests.chaos.faults import FAULTS, Fault, Instrument

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="needs /proc"), pytest.mark.timeout(1200)]

PLANTED = """
import sys
from pathlib import Path
import torch
import evaluation.cli
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.__main__ import write_results
from tests.chaos.trials import prepare, run_trials, some_faults

torch.set_num_threads(1)
folder, points, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
reference = prepare(folder / "work")
faults = some_faults(reference, points, seed, [*FAULTS, "NaN"])
write_results(folder / "sound", "sound", reference, list(run_trials(reference, faults, folder / "work")))

def in_place(path, value):
    with open(path, "w") as file:
        file.write(str(value))

evaluation.cli.write_json = in_place
faults = [Fault("eval wikitext103", 0, number, "SIGKILL", "planted") for number in range(6, 9)]
write_results(folder / "planted", "planted", reference, list(run_trials(reference, faults, folder / "planted-work")))
"""


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fourteen faults by a seed, and a few more on a suite in which results are written in place."""
    folder = tmp_path_factory.mktemp("chaos")
    done = subprocess.run(
        [sys.executable, "-c", PLANTED, str(folder), "14", "11"], cwd=ROOT, capture_output=True, text=True, timeout=1100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_a_seeded_sample_of_faults_is_survived(tried: Path) -> None:
    found = json.loads((tried / "sound" / "chaos.json").read_text(encoding="utf-8"))
    assert [(trial["fault"], trial["failure"]) for trial in found["trials"] if trial["failure"]] == []
    assert found["tried"] == found["survived"] == 14
    assert {trial["stage"] for trial in found["trials"]} == {"data", "train", "evaluate", "report"}
    assert {trial["fault"]["name"] for trial in found["trials"]} == {*FAULTS, "NaN"}
    struck = [trial for trial in found["trials"] if trial["fault"]["name"] in ("SIGKILL", "NaN")]
    assert all(trial["exit_code"] != 0 for trial in struck)
    assert sum(found["points"].values()) > 600
    assert "| all |" in (tried / "sound" / "chaos.md").read_text(encoding="utf-8")


def test_a_result_that_is_written_in_place_is_lost_and_that_is_found(tried: Path) -> None:
    found = json.loads((tried / "planted" / "chaos.json").read_text(encoding="utf-8"))
    assert found["survived"] < found["tried"]
    table = (tried / "planted" / "chaos.md").read_text(encoding="utf-8")
    assert "- evaluate, rank 0, SIGKILL at planted: " in table


def test_a_full_disk_stays_full_and_another_error_comes_once(tmp_path: Path) -> None:
    for name, later in (("ENOSPC", True), ("EIO", False)):
        points = Instrument(tmp_path, Fault("data", 0, 1, name, ""))
        points.begin("data")
        points.touch("open", str(tmp_path / "a"))
        with pytest.raises(OSError, match="No space left" if later else "Input/output"):
            points.touch("write", str(tmp_path / "a"))
        points.touch("remove", str(tmp_path / "a"))
        if later:
            with pytest.raises(OSError, match="No space left"):
                points.touch("write", str(tmp_path / "b"))
        else:
            points.touch("write", str(tmp_path / "b"))


def test_a_fault_strikes_its_own_stage_and_rank_only(tmp_path: Path) -> None:
    points = Instrument(tmp_path, Fault("train", 1, 0, "EIO", ""))
    for stage, rank in (("data", 1), ("train", 0)):
        points.begin(stage, rank)
        points.touch("write", str(tmp_path / "a"))
    points.begin("train", 1)
    with pytest.raises(OSError, match="Input/output"):
        points.touch("write", str(tmp_path / "a"))
    assert points.inside(tmp_path / "deep" / "file") == str(tmp_path / "deep" / "file")
    assert points.inside(tmp_path.parent / "elsewhere") is None
