"""A training scores its checkpoints by `mlm-eval`, and is otherwise the training that it would be
without."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.data_pipeline.contamination.testsets import TEST_SETS
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.launch.threads import run_threads
from mlm_repro.engine.run import scores
from mlm_repro.engine.run.files import read_metrics, read_summary
from mlm_repro.engine.run.resolved import resolve
from mlm_repro.engine.trainer import Trainer
from mlm_repro.evaluation.schema import ClozeResult, Result
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.chain import checkpoint_path, complete_checkpoints
from mlm_repro.lineage.config import override_config
from mlm_repro.lineage.digest import check_seal, read_digest, sha256_file
from mlm_repro.lineage.errors import IntegrityFailure, Interrupted
from mlm_repro.lineage.files import read_document
from mlm_repro.reports.training import Trainings
from mlm_repro.verify.recomputed import RunCheck
from mlm_repro.verify.replay import replay
from tests.commands import Command, Program
from tests.engine.conftest import write_dataset
from tests.engine.small_run import (
    assert_same_training,
    finish,
    mlm_train,
    ranks_of,
    small_config,
    start,
    train,
    write_toml,
)
from tests.made_data import lambada
from tests.ports import held_port
from tests.processes import is_running

SHORT = {
    "iterations": 4,
    "warmup_iterations": 1,
    "validation_interval": 4,
    "checkpoint_interval": 2,
    "keep_checkpoints": 2,
}
PUBLISHED = """#!{python}
import sys
from mlm_repro.data_pipeline.contamination.testsets import TEST_SETS
from mlm_repro.evaluation.cli import main
file = TEST_SETS["lambada"]
TEST_SETS["lambada"] = file.model_copy(update={{"sha256": "{digest}"}})
main()
"""
"""`mlm-eval` that takes a made file for the published one."""
STAND_IN = """#!{python}
import json, os, sys, time
from pathlib import Path
folder = Path(__file__).parent
verb, *words = sys.argv[1:]
mode = (folder / "mode").read_text()
if verb == "check":
    with (folder / "checks").open("a") as checks:
        checks.write(os.environ.get("RANK", "none") + " ")
    sys.exit("error: not here\\n" if mode == "refuses" else 0)
out = Path(words[words.index("--json") + 1])
metrics = (out.parents[2] / "metrics.jsonl").read_text().splitlines()
reached = max(json.loads(line)["iteration"] for line in metrics)
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps([words[0], out.parent.name, reached, os.getpid()]) + "\\n")
if mode == "fails":
    sys.exit("error: no\\n")
if mode == "hangs":
    time.sleep(600)
time.sleep(float(mode))
out.parent.mkdir(parents=True, exist_ok=True)
out.write_text(json.dumps({{"task": words[0], "accuracy": reached / 8, "perplexity": None}}))
"""
"""A program in the place of `mlm-eval` that starts at once and does what the file `mode` says; it
notes its protocol, checkpoint, the iteration that the metrics had reached, and its process, or the
rank that asks for a check."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("words") / "words")


def program(place: Path, text: str, monkeypatch: pytest.MonkeyPatch, **values: str) -> Path:
    """A program that trainings of this process take for `mlm-eval`."""
    place.parent.mkdir()
    place.write_text(text.format(python=sys.executable, **values), encoding="utf-8")
    place.chmod(0o755)
    monkeypatch.setattr(scores, "PROGRAM", place)
    return place


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made LAMBADA of 20 passages passes for the published one, here and in `mlm-eval`."""
    file = TEST_SETS["lambada"]
    path = tmp_path / "data" / file.place
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in lambada(20, seed=3)))
    digest = sha256_file(path)
    monkeypatch.setenv("MLM_DATA_DIR", str(tmp_path / "data"))
    if "NUMBA_CACHE_DIR" not in os.environ:  # the test's own cache has no compiled kernels
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(Path.home() / ".cache" / "mlm-repro" / "kernels"))
    monkeypatch.setitem(TEST_SETS, "lambada", file.model_copy(update={"sha256": digest}))
    return program(tmp_path / "bin" / "mlm-eval", PUBLISHED, monkeypatch, digest=digest)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a program that stands in for `mlm-eval`, with its `mode` and `calls`."""
    place = program(tmp_path / "bin" / "mlm-eval", STAND_IN, monkeypatch)
    (place.parent / "mode").write_text("0")
    return place.parent


def calls(folder: Path) -> list[tuple[str, str, int, int]]:
    """What the program noted, a tuple for each time it was asked to score."""
    return [tuple(json.loads(line)) for line in (folder / "calls").read_text().splitlines()]


def asking(data: Path, **recipe: Any) -> RunConfig:
    return override_config(small_config(data, **SHORT | recipe), ["record.evaluate=lambada"])


def without_times(run: Path) -> list[JSON]:
    timed = ("seconds", "tokens_per_second", "model_tflops")
    return [
        {name: value for name, value in line.items() if name not in timed}
        for line in read_metrics(run)
    ]


def test_the_command_scores_a_checkpoint(data: Path, published: Path, tmp_path: Path) -> None:
    run = train(asking(data, checkpoint_interval=4), tmp_path).path
    check_seal(run)
    [file] = run.rglob("lambada.json")
    assert file == run / "scores" / "iter_0000004" / "lambada.json"
    result = read_document(file, Result)
    assert isinstance(result, ClozeResult)
    assert result.checkpoint_digest == read_digest(checkpoint_path(run, 4))
    assert (result.task, result.num_examples) == ("lambada", 20)
    assert result.data_digest == sha256_file(tmp_path / "data" / TEST_SETS["lambada"].place)


def test_the_training_is_the_same_and_its_seal_covers_the_scores(
    data: Path, stand_in: Path, tmp_path: Path
) -> None:
    run = train(asking(data), tmp_path / "runs").path
    plain = train(small_config(data, **SHORT), tmp_path / "plain").path
    assert_same_training(run, plain)
    assert without_times(run) == without_times(plain)
    broken = [text.replace(str(plain), str(run)) for text in RunCheck(plain).broken]
    assert RunCheck(run).broken == broken
    (curve,) = Trainings([run]).exhibits["lambada-accuracy"].panels[0].layers
    assert [(point.x, point.value) for point in curve.points] == [(2, 0.25), (4, 0.5)]
    (stand_in / "mlm-eval").unlink()  # a replay scores nothing
    replay(run, 1)
    (run / "scores" / "iter_0000002" / "lambada.json").write_text("{}")
    with pytest.raises(IntegrityFailure, match=r"lambada\.json was changed after"):
        check_seal(run)


def test_ranks_that_are_threads_score_once(data: Path, stand_in: Path, tmp_path: Path) -> None:
    run_threads(train, 2, asking(data), tmp_path)
    assert [call[:3] for call in calls(stand_in)] == [
        ("lambada", "iter_0000002", 2),
        ("lambada", "iter_0000004", 4),
    ]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("whom", ["alone", "launcher", "rank 1"])
def test_a_stop_ends_the_wait_and_the_resume_makes_up_for_the_score(
    whom: str, data: Path, stand_in: Path, tmp_path: Path
) -> None:
    toml = write_toml(tmp_path / "small.toml", data, **SHORT)
    (stand_in / "mode").write_text("hangs")
    settings = ("--set=record.evaluate=lambada", "--runs", tmp_path / "runs")
    plant = f"mlm_eval={stand_in / 'mlm-eval'}"
    ranks = 1 if whom == "alone" else 2
    process = start("run", toml, *settings, "--ranks", ranks, plant=plant)
    scoring = wait_for_call(process, stand_in)
    os.kill(ranks_of(process.pid)[1] if whom == "rank 1" else process.pid, signal.SIGTERM)
    began = time.monotonic()
    code, _, err = finish(process)
    assert time.monotonic() - began < 30, "it did not wait for the ten minutes of the scoring"
    assert code == 7, err
    assert "stopped while a checkpoint was scored; `mlm-train resume" in err
    assert not is_running(scoring)
    run = resolve(small_config(data, **SHORT), ranks).begin(tmp_path / "runs").path
    assert complete_checkpoints(run) == [checkpoint_path(run, 2)]
    assert not list(run.rglob("lambada.json"))

    (stand_in / "mode").write_text("0")
    code, _, err = mlm_train("resume", run, "--ranks", ranks, plant=plant)
    assert code == 0, err
    assert [call[1:3] for call in calls(stand_in)] == [
        ("iter_0000002", 2),
        ("iter_0000002", 2),
        ("iter_0000004", 4),
    ], "the missing score came before training went on, and none came twice"
    check_seal(run)


def wait_for_call(process: Program, folder: Path) -> int:
    """The process of the scoring that a training has begun."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.err
        if (folder / "calls").is_file() and (made := calls(folder)):
            return made[0][3]
        time.sleep(0.02)
    raise AssertionError("nothing was scored")


def test_a_score_that_is_there_is_not_taken_again(
    data: Path, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterate = Trainer.iterate

    def iterate_or_end(self: Trainer, number: int) -> Any:
        if number == 2:
            raise RuntimeError("as if it were killed after its first scores")
        return iterate(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "iterate", iterate_or_end)
        with pytest.raises(RuntimeError, match="as if it were killed"):
            train(asking(data), tmp_path)
    with pytest.raises(Interrupted, match="stopped after iteration 3 of 4"):
        train(asking(data), tmp_path, until=3)
    train(asking(data), tmp_path)
    assert [call[1:3] for call in calls(stand_in)] == [
        ("iter_0000002", 2),
        ("iter_0000003", 3),
        ("iter_0000004", 4),
    ]


def test_a_scoring_that_fails_is_a_warning(
    data: Path, stand_in: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (stand_in / "mode").write_text("fails")
    run = train(asking(data), tmp_path)
    assert run.is_complete
    assert not (run.path / "scores").exists()
    lines = capfd.readouterr().err.splitlines()
    assert lines.count("warning: no scores by lambada: mlm-eval ended with exit code 1") == 2
    name = asking(data).name
    announced = [line for line in lines if ": scores iteration" in line]
    assert announced == [f"{name}: scores iteration {n} by lambada" for n in (2, 4)]


def test_the_wait_is_no_second_of_the_training(data: Path, stand_in: Path, tmp_path: Path) -> None:
    (stand_in / "mode").write_text("3")
    began = time.monotonic()
    run = train(asking(data), tmp_path)
    whole = time.monotonic() - began
    # A rehearsal and a validation are no part of it either.
    assert read_summary(run.path).train_seconds < whole - 6


@pytest.mark.parametrize(
    ("protocol", "said"),
    [
        ("lambada", "lambada/lambada_test.jsonl is neither in MLM_DATA_DIR nor in"),
        ("lambada,lambda", "unknown protocol 'lambda'; did you mean 'lambada'?"),
    ],
)
def test_what_cannot_be_scored_is_said_before_training(
    protocol: str, said: str, data: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    nowhere = {"MLM_DATA_DIR": str(tmp_path), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    if protocol != "lambada":
        request.getfixturevalue("published")
        nowhere = {}
    toml = write_toml(tmp_path / "small.toml", data, **SHORT)
    words = (f"--set=record.evaluate={protocol}", "--ranks", 2, "--runs", tmp_path / "runs")
    for more in (["--dry-run"], []):
        code, out, err = mlm_train("run", toml, *words, *more, **nowhere)
        sentences = [line for line in err.splitlines() if not line.startswith("cost: ")]
        assert (code, out, len(sentences)) == (2, "", 1), err
        assert sentences[0].startswith(f"error: {said}")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("mode", ["refuses", "0"])
def test_of_launched_ranks_the_first_asks_and_all_stop(
    mode: str, data: Path, stand_in: Path, tmp_path: Path
) -> None:
    (stand_in / "mode").write_text(mode)
    toml = write_toml(tmp_path / "small.toml", data, **SHORT)
    with held_port() as port:
        ranks = [
            start(
                *("run", toml, "--set=record.evaluate=lambada", "--runs", tmp_path / "runs"),
                plant=f"mlm_eval={stand_in / 'mlm-eval'}",
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            for rank in range(2)
        ]
        done = [finish(rank) for rank in ranks]
    refuses = mode == "refuses"
    assert [code for code, _, _ in done] == [2 * refuses] * 2, done
    assert ("error: not here" in done[0][2]) == refuses
    assert (stand_in / "checks").read_text() == "0 "
    assert bool(list((tmp_path / "runs").glob("small-*/metrics.jsonl"))) != refuses


def test_test_files_are_found_without_a_model(
    published: Path, mlm_eval: Command, tmp_path: Path
) -> None:
    done = mlm_eval("check", "lambada", "lambada-lm-eval", ends=0)
    place = tmp_path / "data" / TEST_SETS["lambada"].place
    assert done.out.splitlines() == [str(place)] * 2
    assert mlm_eval("check", "lambda", ends=2).error.endswith("did you mean 'lambada'?")
