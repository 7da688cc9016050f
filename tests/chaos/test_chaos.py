"""Faults struck at random points of a reproduction are survived, and one that is not is found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.rooms import ROOT
from tests.chaos.faults import FAULTS

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc"),
    pytest.mark.timeout(1200),
]

PLANTED = """
import sys
from pathlib import Path
import torch
from mlm_repro.evaluation import cli as evaluation_cli
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

evaluation_cli.write_json = in_place
faults = [Fault("eval wikitext103", 0, number, "SIGKILL", "planted") for number in range(6, 9)]
write_results(folder / "planted", "planted", reference, list(run_trials(reference, faults, folder / "planted-work")))
"""  # noqa: E501


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fourteen faults by a seed, and a few more on a suite in which results are written in
    place."""
    folder = tmp_path_factory.mktemp("chaos")
    done = subprocess.run(
        [sys.executable, "-c", PLANTED, str(folder), "14", "11"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_a_seeded_sample_of_faults_is_survived(tried: Path) -> None:
    found = json.loads((tried / "sound" / "chaos.json").read_text(encoding="utf-8"))
    assert [
        (trial["fault"], trial["failure"]) for trial in found["trials"] if trial["failure"]
    ] == []
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
