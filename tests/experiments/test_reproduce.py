"""A whole reproduction at the smallest size: its files, its reuse, its recovery."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors import safe_open

from mlm_repro.data_pipeline.files import DataCard, Ledger
from mlm_repro.data_pipeline.runner import SHELF
from mlm_repro.engine.run.files import Step, TrainingSummary, Validation
from mlm_repro.evaluation.schema import Result
from mlm_repro.experiments.catalogue import load_experiments
from mlm_repro.experiments.files import ReproductionScores, read_evaluations, read_runs
from mlm_repro.experiments.published import published_records
from mlm_repro.experiments.reproduce.files import ReproductionSummary
from mlm_repro.experiments.reproduce.plan import SMOKE, make_plan, twin_rule
from mlm_repro.experiments.verdicts import judge, load_results
from mlm_repro.lineage.digest import check_seal, read_digest, seal
from mlm_repro.lineage.files import FileSchema, Manifest, read_document
from mlm_repro.lineage.records import Record, read_records
from mlm_repro.lineage.run import RunDirectory
from mlm_repro.verify.recomputed import RunCheck
from tests.chaos.job import leave_figures_blank
from tests.commands import ROOT, call
from tests.experiments.machines import with_gpus
from tests.experiments.quick_steps import take_quick_steps
from tests.processes import hold, is_running, is_told, tell, tree

ARGUMENTS = ("reproduce", "355m", "--smoke", "--runs")
NAMES = ("data-smoke", "355m-smoke", "reproduce-355m-smoke")


class Finished(NamedTuple):
    """A finished reproduction: its runs, what it printed, the machine it ran on."""

    runs: Path
    output: str
    machine: dict[str, str]

    def directory(self, name: str) -> Path:
        return (self.runs / name).resolve()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """`mlm-experiment reproduce 355m --smoke` from nothing; not to be changed."""
    root = tmp_path_factory.mktemp("reproduction")
    machine = with_gpus(root / "bin", 0, 0)
    done = call(
        machine, "mlm-experiment", *ARGUMENTS, root / "runs", ends=0, prepare=take_quick_steps
    )
    return Finished(root / "runs", done.out, machine)


@pytest.fixture
def with_data(finished: Finished, tmp_path: Path) -> Path:
    """A folder of runs in which only the dataset is there."""
    path = finished.directory("data-smoke")
    shutil.copytree(path, tmp_path / "runs" / path.name)
    return tmp_path / "runs"


def json_of(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def metrics(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["kind"] == kind]


def of_run(finished: Finished) -> list[Record]:
    """The records that are not published numbers."""
    records = read_records(finished.directory("reproduce-355m-smoke") / "records.jsonl")
    return [record for record in records if record.kind != "published"]


def test_there_are_three_complete_runs_and_each_verifies(finished: Finished) -> None:
    directories = [
        path for path in finished.runs.iterdir() if not path.is_symlink() and path.name != SHELF
    ]
    assert {RunDirectory.open(path).manifest["name"] for path in directories} == set(NAMES)
    assert len(directories) == len(NAMES)
    for path in directories:
        done = call(
            finished.machine, "mlm-verify", "run", path, ends=0, prepare=leave_figures_blank
        )
        assert f"ok {read_digest(path)[:16]} {path}" in done.out


def test_nothing_but_its_three_runs_is_made(finished: Finished) -> None:
    # Each with its link, and the shelf of the data.
    assert len(list(finished.runs.iterdir())) <= 2 * len(NAMES) + 1
    reproduction = finished.directory("reproduce-355m-smoke")
    assert {path.parent.name for path in reproduction.glob("*/COMPLETE")} <= {"report"}
    found = {
        verdict.outcome
        for verdict in judge(load_experiments().values(), load_results([finished.runs]))
    }
    assert {"predicted", "confirmed"} <= found, "what is worked out needs no run"


def test_curves_are_those_of_the_training_run(finished: Finished) -> None:
    training = RunDirectory.open(finished.directory("355m-smoke"))
    curves = {
        quantity: [(r.x, r.value) for r in of_run(finished) if r.quantity == quantity]
        for quantity in ("training_loss", "validation_perplexity", "final_validation_perplexity")
    }
    validations = [
        (m["iteration"], m["perplexity"])
        for m in metrics(training.path, "validation")
        if m["iteration"]
    ]
    assert curves["training_loss"] == [
        (m["iteration"], m["loss"]) for m in metrics(training.path, "train")
    ]
    assert curves["validation_perplexity"] == validations
    assert [x for x, _ in validations] == [4, 8, 12]
    assert curves["final_validation_perplexity"] == [
        (12, json_of(training.path / "summary.json")["validation_perplexity"])
    ]
    for record in of_run(finished):
        assert (record.series, record.kind, record.source) == ("355m", "scaled", training.path.name)
        assert record.seed == 1234
        if record.x is not None:
            assert (record.digest, record.x_name) == (training.digest, "iteration")


def test_scores_are_those_of_the_evaluations_and_say_where_they_are_partial(
    finished: Finished,
) -> None:
    reproduction = finished.directory("reproduce-355m-smoke")
    checkpoint = finished.directory("355m-smoke") / "checkpoints" / "iter_0000012"
    words, cloze = (
        read_evaluations(reproduction)[f"355m-{task}"] for task in ("wikitext103", "lambada")
    )
    text, last = words["task"].removesuffix("-perplexity"), cloze["task"].replace("-", "_")
    part = f"partial: {words['num_scored_tokens']:,} tokens scored"
    some = f"partial: {cloze['num_examples']:,} examples scored" * cloze["partial"]
    expected = {
        f"{text}_perplexity": (words["perplexity"], "", part),
        f"{text}_bits_per_byte": (words["bits_per_byte"], "", part),
        f"{last}_accuracy": (cloze["accuracy"] * 100, "%", some),
        f"{last}_log_likelihood": (-math.log(cloze["perplexity"]), "nats", some),
    }
    records = [record for record in of_run(finished) if record.experiment == "2019/table-3"]
    assert {
        record.quantity: (record.value, record.unit, record.note) for record in records
    } == expected
    assert {record.digest for record in records} == {check_seal(checkpoint)}
    assert words["partial"]
    assert words["num_windows"] == SMOKE.windows
    assert cloze["num_examples"] == SMOKE.examples or not cloze["partial"]
    published = read_records(reproduction / "records.jsonl")
    assert [r for r in published if r.kind == "published"] == list(published_records(("355m",)))


def test_the_summary_is_that_of_the_runs(finished: Finished) -> None:
    summary = json_of(finished.directory("reproduce-355m-smoke") / "summary.json")
    run = finished.directory("355m-smoke")
    trained, dataset = (
        json_of(run / "summary.json"),
        json_of(finished.directory("data-smoke") / "dataset.json"),
    )
    assert (summary["target"], summary["mode"], summary["reason"]) == (
        "355m",
        "scaled",
        "asked for",
    )
    assert summary["twin_rule"] == twin_rule(make_plan("355m", "scaled", True, None).configs[0])
    assert summary["source"] == dataset["source"]
    assert set(summary["commands"].values()) == {"mlm-experiment reproduce 355m --smoke"}
    (model,) = summary["models"]
    assert (model["name"], model["run"], model["seed"]) == ("355m", run.name, 1234)
    assert model["checkpoint_digest"] == read_digest(run / "checkpoints" / "iter_0000012")
    for key in ("tokens", "train_seconds", "tokens_per_second"):
        assert model[key] == trained[key] > 0
    assert model["tokens"] == 12 * 4 * 128
    assert model["published"] == {
        "num_layers": 24,
        "hidden_size": 1024,
        "num_heads": 16,
        "seq_length": 1024,
        "vocab_size": 50257,
        "global_batch_size": 512,
        "iterations": 300_000,
        "learning_rate": 1.5e-4,
        "parameters": 355_788_800,
    }
    with safe_open(
        run / "checkpoints" / "iter_0000012" / "model-tp00-pp000.safetensors", framework="np"
    ) as file:
        stored = sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118
    assert model["trained"]["parameters"] == stored
    assert model["trained"]["vocab_size"] == dataset["vocab_size"]


def test_everything_that_it_hands_on_is_read_whole(finished: Finished) -> None:
    reproduction = finished.directory("reproduce-355m-smoke")
    documents: dict[Path, type[FileSchema]] = {
        reproduction / "manifest.json": Manifest,
        reproduction / "summary.json": ReproductionSummary,
        reproduction / "ledger.json": Ledger,
        reproduction / "dataset.json": DataCard,
        reproduction / "scores.json": ReproductionScores,
    }
    for path, schema in documents.items():
        assert read_document(path, schema).to_json() == json_of(path), path
    (kept,) = read_runs(reproduction).values()
    assert kept.name == "355m"
    for values, model in ((kept.manifest, Manifest), (kept.summary, TrainingSummary)):
        assert model.model_validate(values).to_json() == values
    for line in kept.metrics:
        of_line: type[FileSchema] = Step if line["kind"] == "train" else Validation
        assert of_line.model_validate(line).to_json() == line
    for result in read_evaluations(reproduction).values():
        assert Result.model_validate(result).to_json() == result


def test_the_ledger_is_a_copy_and_the_report_is_there(finished: Finished) -> None:
    reproduction = finished.directory("reproduce-355m-smoke")
    ledger = finished.directory("data-smoke") / "ledger.json"
    assert (reproduction / "ledger.json").read_bytes() == ledger.read_bytes()
    page = (reproduction / "report" / "index.html").read_text(encoding="utf-8")
    assert "355m" in page
    assert "scaled" in page
    assert f"report: {finished.runs}/reproduce-355m-smoke-" in finished.output
    same = re.search(r'<th scope="row">same</th><td class="n">\d+ \((\d+)\)</td>', page)
    assert same, "the page does not count what was measured"
    assert int(same[1]) >= 80
    places = [
        page.index(f'<section id="{name}"')
        for name in ("same", "reduced", "simulated", "not-tried")
    ]
    assert places == sorted(places)
    effects = page[places[1] : places[2]]
    assert "</span> undecided" in effects
    assert len(page.encode()) <= 2_500_000


def test_every_step_is_printed_as_a_command(finished: Finished) -> None:
    steps = [
        line.removeprefix("$ ").split()[:2]
        for line in finished.output.splitlines()
        if line.startswith("$ ")
    ]
    assert steps == [
        ["mlm-data", "run"],
        ["mlm-train", "run"],
        ["mlm-eval", "wikitext103"],
        ["mlm-eval", "lambada"],
        ["mlm-report", "build"],
    ]


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file."""
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file()
    }


def test_a_second_call_finds_everything_and_writes_nothing(finished: Finished) -> None:
    before = snapshot(finished.runs)
    digests = [read_digest(finished.directory(name)) for name in NAMES]
    done = call(finished.machine, "mlm-experiment", *ARGUMENTS, finished.runs, ends=0)
    said = (done.out + done.err).splitlines()
    assert sorted(line for line in said if line.startswith("already complete: ")) == sorted(
        f"already complete: {finished.directory(name)}" for name in NAMES
    )
    assert snapshot(finished.runs) == before
    assert [check_seal(finished.directory(name)) for name in NAMES] == digests


@pytest.fixture
def reproduction(finished: Finished, tmp_path: Path) -> Iterator[Path]:
    """The reproduction's directory, which the test may change: it is put back afterwards."""
    directory = finished.directory("reproduce-355m-smoke")
    shutil.copytree(directory, tmp_path / "kept")
    yield directory
    shutil.rmtree(directory)
    shutil.copytree(tmp_path / "kept", directory)


def test_a_lost_report_is_built_again_and_nothing_else(
    finished: Finished, reproduction: Path
) -> None:
    shutil.rmtree(reproduction / "report")
    before, digest = snapshot(finished.runs), read_digest(reproduction)
    call(
        finished.machine,
        "mlm-experiment",
        *ARGUMENTS,
        finished.runs,
        ends=0,
        prepare=take_quick_steps,
    )
    after = snapshot(finished.runs)
    assert {name: after[name] for name in before} == before
    assert str(reproduction / "report" / "index.html") in after
    assert check_seal(reproduction) == digest


def test_an_evaluation_is_not_made_again_and_keeps_its_name(
    finished: Finished, reproduction: Path
) -> None:
    for name in ("COMPLETE", "records.jsonl", "scores.json", "summary.json"):
        (reproduction / name).unlink()
    path = reproduction / "evaluations.jsonl"
    first, second = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert second["name"] == "355m-wikitext103"
    second["result"] |= {"task": "heldout-perplexity", "perplexity": 123.5, "partial": False}
    path.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    done = call(
        finished.machine,
        "mlm-experiment",
        *ARGUMENTS,
        finished.runs,
        ends=0,
        prepare=take_quick_steps,
    )
    assert "mlm-eval" not in done.out
    found = {
        r.quantity: (r.value, r.note)
        for r in read_records(reproduction / "records.jsonl")
        if r.kind == "scaled"
    }
    assert found["heldout_perplexity"] == (123.5, "")
    assert "wikitext103_perplexity" not in found
    assert check_seal(reproduction)


def test_a_further_seed_is_trained_beside_what_is_there(finished: Finished, tmp_path: Path) -> None:
    shutil.copytree(finished.runs, tmp_path / "runs", symlinks=True)
    arguments = (*ARGUMENTS[:-1], "--seeds", "2", "--runs", tmp_path / "runs")
    done = call(finished.machine, "mlm-experiment", *arguments, ends=0, prepare=take_quick_steps)
    assert done.out.count("\n$ mlm-train run") == 2
    assert f"already complete: {tmp_path}/runs/355m-smoke-" in done.out + done.err
    shown = {path.name for path in (tmp_path / "runs").iterdir() if path.name != SHELF}
    assert {name for name in shown if not re.search("-[0-9a-f]{8}$", name)} == {*NAMES, "seeds"}
    reproduction = (tmp_path / "runs" / "reproduce-355m-smoke").resolve()
    summary = read_document(reproduction / "summary.json", ReproductionSummary)
    assert [(model.name, model.series, model.seed) for model in summary.models] == [
        ("355m", "355m", 1234),
        ("355m-seed-1235", "355m", 1235),
    ]
    assert summary.commands["models"] == "mlm-experiment reproduce 355m --smoke --seeds 2"
    records = [
        record
        for record in read_records(reproduction / "records.jsonl")
        if record.kind != "published"
    ]
    ends = {r.seed: r for r in records if r.quantity == "final_validation_perplexity"}
    assert set(ends) == {1234, 1235, None}
    assert ends[1234].value != ends[1235].value
    assert ends[None].value == pytest.approx((ends[1234].value + ends[1235].value) / 2)
    assert ends[None].note.startswith("mean of 2 seeds, ")
    scores = read_document(reproduction / "scores.json", ReproductionScores)
    assert (scores.seeds, scores.models, scores.comparisons) == (2, ["355m"], [])
    shutil.rmtree(reproduction / "report")
    again = call(finished.machine, "mlm-experiment", *arguments, ends=0, prepare=take_quick_steps)
    assert again.out.count("already complete") == 3  # two trainings and the reproduction
    shutil.rmtree(reproduction / "report")
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    reproduction = tmp_path / "elsewhere" / reproduction.name
    check = RunCheck(reproduction)
    assert (check.broken, check.absent) == ([], [])
    forged = json_of(reproduction / "scores.json")
    forged["articles"] += 1
    (reproduction / "scores.json").write_text(json.dumps(forged), encoding="utf-8")
    seal(reproduction)
    assert any(each.startswith("scores.json: ") for each in RunCheck(reproduction).broken)
    (seed,) = (
        path for path in (tmp_path / "elsewhere" / "seeds").iterdir() if not path.is_symlink()
    )
    summary_of_seed = json_of(seed / "summary.json")
    (seed / "summary.json").write_text(
        json.dumps(summary_of_seed | {"validation_loss": 1.0}), encoding="utf-8"
    )
    seal(seed)
    assert any(seed.name in each for each in RunCheck(reproduction).broken)


class Training(NamedTuple):
    """A reproduction that stands still in its training."""

    command: "subprocess.Popen[str]"
    launchers: list[int]
    """The command and, where there are several ranks, the process that started them."""
    ranks: list[int]
    """Processes that train. Several lead sessions of their own, which no signal to the command's
    group reaches."""

    def go_on(self) -> None:
        """Let all go on, a rank when the stop has been passed on to it: it is near its end."""
        tell(self.launchers, signal.SIGCONT)
        deadline = time.monotonic() + 60
        while not all(is_told(rank, signal.SIGTERM, signal.SIGINT) for rank in self.ranks):
            assert time.monotonic() < deadline, "the ranks were told nothing"
            time.sleep(0.01)
        tell(self.ranks, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the command's group, and wait until the ranks have gone with it."""
        with suppress(ProcessLookupError):
            os.killpg(self.command.pid, signal.SIGKILL)
        self.command.wait(300)
        while any(map(is_running, self.ranks)):
            time.sleep(0.01)


@pytest.fixture
def start(finished: Finished, with_data: Path) -> Iterator[Callable[[], Training]]:
    """Start the reproduction in a process group of its own, as a shell does, and hold it still
    while it trains."""
    trainings = []
    steps = len(metrics(finished.directory("355m-smoke"), "train"))

    def trained() -> int:
        return sum(
            path.read_text().count('"train"')
            for path in with_data.glob("355m-smoke-*/metrics.jsonl")
        )

    def start() -> Training:
        # So short a training may be near its end before this process has its turn.
        for _ in range(9):
            process = subprocess.Popen(
                [Path(sys.executable).with_name("mlm-experiment"), *ARGUMENTS, with_data],
                env=finished.machine,
                cwd=ROOT,
                start_new_session=True,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            trainings.append(Training(process, [], []))
            deadline = time.monotonic() + 600
            held: list[int] = []
            while not trained():
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < deadline
                # In slices, so that no load of the machine hides its steps; not before all ranks
                # have come, since a launcher in slices is starved on a busy machine.
                if [*with_data.glob("355m-smoke-*/metrics.jsonl")]:
                    tell(held, signal.SIGCONT)
                    time.sleep(0.004)
                    held = hold(process.pid)
                else:
                    time.sleep(0.002)
            held = hold(process.pid)
            launchers = [each for each in held if len([*tree(each)]) > 1]
            ranks = [each for each in held if is_running(each) and each not in launchers]
            training = trainings[-1] = Training(process, launchers, ranks)
            if 2 * trained() < steps:
                return training
            training.kill()
            for path in (*with_data.glob("355m-smoke*"), *with_data.glob("reproduce-*")):
                path.unlink() if path.is_symlink() else shutil.rmtree(path)
        raise AssertionError("nine trainings were half over before they could be stopped")

    yield start
    for training in trainings:
        training.kill()
        training.command.communicate()


def unfinished(runs: Path) -> Path:
    """The training run, which must not be complete."""
    (run,) = runs.glob("355m-smoke-*")
    assert not (run / "COMPLETE").exists(), "training was over before it could be stopped"
    return run


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_after_a_kill_in_training_the_same_command_finishes(
    finished: Finished, with_data: Path, start: Callable[[], Training]
) -> None:
    start().kill()
    run = unfinished(with_data)
    assert call(finished.machine, "mlm-verify", "run", run).code == 6
    call(
        finished.machine, "mlm-experiment", *ARGUMENTS, with_data, ends=0, prepare=take_quick_steps
    )
    for name in NAMES:
        check_seal((with_data / name).resolve())
    whole = finished.directory("355m-smoke")
    for kind in ("train", "validation", "final-validation"):
        assert [(line["iteration"], line["loss"]) for line in metrics(run, kind)] == [
            (line["iteration"], line["loss"]) for line in metrics(whole, kind)
        ], "interrupted and uninterrupted training differ"
    scores = [
        {
            r.quantity: r.value
            for r in read_records(root / "records.jsonl")
            if r.kind == "scaled" and r.x is None
        }
        for root in (with_data / "reproduce-355m-smoke", finished.runs / "reproduce-355m-smoke")
    ]
    assert scores[0] == scores[1]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a step outlives a killed parent")
def test_a_step_does_not_outlive_the_job_and_leaves_a_checkpoint(
    with_data: Path, start: Callable[[], Training]
) -> None:
    training = start()
    training.command.kill()
    training.command.wait(300)
    training.go_on()
    # Its output ends when all who write to it have ended.
    training.command.communicate(timeout=600)
    checkpoints = list((unfinished(with_data) / "checkpoints").glob("iter_*"))
    assert checkpoints
    for checkpoint in checkpoints:
        check_seal(checkpoint)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("how", ["ctrl-c", "sigterm"])
def test_a_stop_in_training_leaves_a_checkpoint_and_exit_code_7(
    with_data: Path, start: Callable[[], Training], how: str
) -> None:
    training = start()
    if how == "ctrl-c":
        os.killpg(training.command.pid, signal.SIGINT)  # as a terminal does
    else:
        training.command.send_signal(signal.SIGTERM)
    training.go_on()
    out, _ = training.command.communicate(timeout=600)
    run = unfinished(with_data)
    assert training.command.returncode == 7, out
    assert "Traceback" not in out
    assert "ended with exit code 7" in out
    checkpoints = list((run / "checkpoints").glob("iter_*"))
    assert checkpoints
    for checkpoint in checkpoints:
        check_seal(checkpoint)
    assert not list(with_data.glob("reproduce-*"))


RECIPE = (
    'name = "own"\n[sources]\nnames = ["{source}"]\n[tokenizer]\nkind = "train"\nvocab_size = 300\n'
)


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("jsonl:nowhere.jsonl", 2, "nowhere.jsonl: there is no file of that path"),
        ("text:{folder}", 2, "`mlm-data run"),
        ("realnews", 5, "`mlm-data run"),
    ],
)
def test_a_step_that_fails_passes_its_exit_code_on(
    tmp_path: Path, source: str, code: int, words: str
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "empty.txt").write_text("")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(source=source.format(folder=tmp_path / "texts")))
    runs = tmp_path / "runs"
    machine = with_gpus(tmp_path / "bin", 0, 0) | {"HOME": str(tmp_path)}
    done = call(
        machine,
        "mlm-experiment",
        *ARGUMENTS,
        runs,
        "--data",
        recipe,
        ends=code,
        prepare=take_quick_steps,
    )
    assert words in done.err
    assert not runs.exists() or list(runs.iterdir()) == []


def test_a_damaged_dataset_stops_the_sequence_before_training(
    finished: Finished, with_data: Path
) -> None:
    (dataset,) = with_data.glob("data-smoke-*")
    (dataset / "COMPLETE").write_text("{")
    done = call(
        finished.machine, "mlm-experiment", *ARGUMENTS, with_data, ends=6, prepare=take_quick_steps
    )
    assert "COMPLETE" in done.err
    assert not list(with_data.glob("355m-smoke*"))
