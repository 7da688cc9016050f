"""A tiny reproduction: a corpus, a dataset, two ranks, two evaluations, a page; it takes two
seconds.

It runs in a forked process and its commands in further ones, so that nothing has to be imported
again.
"""

import contextlib
import gc
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from mlm_repro.engine.run.resolved import read_run_config
from mlm_repro.engine.trainer import Trainer
from mlm_repro.experiments.reproduce import steps
from mlm_repro.experiments.reproduce.plan import Plan, Size
from mlm_repro.experiments.reproduce.reproduction import reproduce
from mlm_repro.experiments.verdicts import load_results
from mlm_repro.lineage.atomic import read_json, write_json
from mlm_repro.lineage.command import run_command
from mlm_repro.lineage.errors import Interrupted
from mlm_repro.lineage.shipped import HOME, model_file
from mlm_repro.reports import experiment_runs, page, render
from tests.chaos.faults import MEANWHILE, Fault, Instrument, Touch, instrument
from tests.ports import held_port

COMMANDS: dict[str, Callable[[], object]] = {
    script.name: script.load()
    for script in entry_points(group="console_scripts")
    if script.name in ("mlm-data", "mlm-train", "mlm-eval", "mlm-report")
}
"""What is disturbed; predictions of what cannot run here are left out."""
GRACE_SECONDS = 8.0
"""After the first process of a command has failed, the others have so long to notice."""
STOPPED_SECONDS = 0.2
"""How long a process that was stopped stands still before it is continued."""
NO_TRACEBACK = 70
"""Exit code of a process that ended with an exception which is no user's error."""
RUNS = Path("runs")
RANKS = 2
WORDS = (
    "river",
    "house",
    "stone",
    "walks",
    "sleeps",
    "under",
    "over",
    "bright",
    "old",
    "wind",
    "and",
    "then",
    "slowly",
    "the",
    "child",
    "reads",
    "while",
    "evening",
    "sings",
    "of",
    "green",
    "hills",
    "beyond",
    "a",
    "quiet",
    "harbour",
    "where",
    "boats",
    "wait",
)
OVERRIDES = (
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_heads=2",
    "model.seq_length=32",
    "train.iterations=6",
    "train.warmup_iterations=1",
    "train.validation_interval=3",
    "train.validation_samples=8",
    "train.checkpoint_interval=2",
    "train.global_batch_size=4",
    "train.microbatch_size=2",
)
DATA_RECIPE = """
name = "tiny"
workers = 1
shard_bytes = 65536
[sources]
names = ["jsonl:corpus.jsonl"]
[decontaminate]
test_sets = []
[tokenizer]
kind = "train"
vocab_size = 300
"""


def write_tiny(folder: Path) -> None:
    """The input: 24 documents of made-up English, two of them nearly alike, and the data recipe."""
    random_words = random.Random(1)
    texts = [
        ". ".join(
            " ".join(random_words.choices(WORDS, k=random_words.randint(8, 14))) for _ in range(30)
        )
        for _ in range(23)
    ]
    texts.append(texts[3].replace("river", "rivers", 1))
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    (folder / "data.toml").write_text(DATA_RECIPE)


def tiny_plan(ranks: int = RANKS) -> Plan:
    """The twin of the 355M model at its very smallest, tensor-parallel, in the current folder.

    On one rank the batch is one microbatch, so that `mlm-train` starts no others.
    """
    overrides = (
        *OVERRIDES,
        f"parallel.tp={ranks}",
        *(() if ranks > 1 else ("train.microbatch_size=4",)),
    )
    size = Size(Path("data.toml"), "tiny", overrides, windows=4, examples=4)
    published = read_run_config(model_file("355m"))
    config = read_run_config(model_file("355m"), ["name=355m-tiny", *overrides], twin=True)
    return Plan(
        target="355m",
        mode="scaled",
        reason="asked for",
        recipe=size.recipe,
        size=size,
        published=(published,),
        configs=(config,),
    )


def warm_up(folder: Path) -> None:
    """Run every command once in this process, so that forked ones find everything imported and
    compiled.

    This process is then fit for nothing but forking jobs: its folder, output and environment are
    others. What takes long and writes nothing is left out: figures are blank.
    """
    _settle(folder, folder / "log")
    leave_figures_blank()
    # What lies with the code is no job's own, and is read once.
    kept = cache(lambda *folders: load_results(folders))
    experiment_runs.load_results = lambda folders: (
        kept(*folders) if folders[0].is_relative_to(HOME) else load_results(folders)
    )

    def step(program: str, *arguments: str) -> None:
        if program not in COMMANDS:
            return
        sys.argv = [program, *arguments]
        with contextlib.suppress(SystemExit):
            COMMANDS[program]()

    steps.run_step = step
    reproduce(tiny_plan(ranks=1), RUNS)
    gc.collect()
    gc.freeze()  # a forked job has garbage of its own alone to look for


def leave_figures_blank() -> None:
    """Draw nothing on pages that this process builds."""
    blank = render.Drawing(render.Markup("<svg></svg>"), b"<svg/>")
    page.render_all = lambda exhibits: {
        exhibit.name: blank for exhibit in exhibits if exhibit.panels
    }


def _settle(place: Path, log: Path) -> None:
    """Make `place` this process's world."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(place)
    os.environ |= {
        "XDG_CACHE_HOME": str(place / "cache"),
        "HOME": str(place),
        "MLM_DATA_DIR": str(place),
        "HF_HUB_OFFLINE": "1",
    }


def start_job(
    place: Path,
    log: Path,
    fault: Fault | None,
    notes: Path | None = None,
    ranks: int = RANKS,
    points: Instrument | None = None,
) -> int:
    """Fork the whole reproduction in `place`, its output in `log`; returns its process id, which
    leads its group.

    With `notes`, a copy of `place` as every command found it, and every point it passed, are kept
    in that folder. `points` watch in the place of an instrument that counts.
    """
    process = os.fork()
    if process:
        return process
    os.setsid()
    _settle(place, log)
    watched = instrument(place, fault, points)
    _call(
        lambda: run_command(lambda **_: _reproduce(watched, notes, ranks)),
        watched,
        "records",
        0,
        notes,
    )


def _reproduce(points: Instrument, notes: Path | None, ranks: int) -> None:
    def step(program: str, *arguments: str) -> None:
        if program not in COMMANDS:
            return
        _run_step(points, notes, ranks, program, *arguments)
        if program == "mlm-train":
            _keep(points, notes, "records")

    steps.run_step = step
    reproduce(tiny_plan(ranks), RUNS)


def _run_step(
    points: Instrument, notes: Path | None, ranks: int, program: str, *arguments: str
) -> None:
    stage = program.removeprefix("mlm-")
    if program == "mlm-eval":
        stage += f" {arguments[0]}"
    _keep(points, notes, stage)
    with held_port() as port:
        where = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
        }
        started = []
        for rank in range(ranks if program == "mlm-train" else 1):
            sys.stdout.flush()
            process = os.fork()
            if process == 0:
                if program == "mlm-train":
                    os.environ |= {**where, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                    _plant_nan(points.fault, rank)
                sys.argv = [program, *arguments]
                _call(COMMANDS[program], points, stage, rank, notes)
            started.append(process)
        codes = wait_for(
            started, goes_on=points.fault is None or points.fault.name not in MEANWHILE
        )
    if failed := [code for code in codes if code]:
        causes = [code for code in failed if code > 0 and code != Interrupted.exit_code]
        raise steps.StepFailed(program, causes[0] if causes else Interrupted.exit_code)


def _call(
    work: Callable[[], Any], points: Instrument, stage: str, rank: int, notes: Path | None
) -> NoReturn:
    """Do this process's work and end it."""
    points.begin(stage, rank)
    code: Any = 0
    try:
        work()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = NO_TRACEBACK
    if notes and not code:
        touches = list(points.touches)
        write_json(notes / f"{stage}@{rank}.json", touches)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else bool(code))


def _keep(points: Instrument, notes: Path | None, stage: str) -> None:
    if notes:
        shutil.copytree(points.folder, notes / stage, symlinks=True)


def _plant_nan(fault: Fault | None, rank: int) -> None:
    """Make one number of the named tensor NaN before the fault's iteration, on its rank."""
    if fault is None or fault.name != "NaN" or fault.rank != rank:
        return
    iterate = Trainer.iterate

    def and_plant(self: Trainer, number: int) -> Any:
        if number == fault.number:
            tensor = next(p.local.data for p in self.model.parameters if p.name == fault.what)
            tensor.view(-1)[0] = float("nan")
        return iterate(self, number)

    Trainer.iterate = and_plant  # type: ignore[method-assign]


def wait_for(started: list[int], timeout_seconds: float = 300.0, goes_on: bool = True) -> list[int]:
    """Exit codes of processes, negative for a signal; one that is stopped `goes_on` a moment later.

    When one has failed the others are ended after a moment, and all at the timeout.
    """
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout_seconds
    while len(codes) < len(started):
        for process in started:
            if process in codes:
                continue
            ended, status = os.waitpid(process, os.WNOHANG | os.WUNTRACED)
            if not ended:
                continue
            if os.WIFSTOPPED(status):
                if not goes_on:
                    continue
                time.sleep(STOPPED_SECONDS)
                os.kill(process, signal.SIGCONT)
                continue
            codes[process] = os.waitstatus_to_exitcode(status)
            if codes[process]:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            for process in started:
                if process not in codes:
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.004)
    return [codes[process] for process in started]


def read_touches(notes: Path) -> dict[tuple[str, int], list[Touch]]:
    """Every point that the undisturbed run passed, by stage and rank."""
    touches = {}
    for path in sorted(notes.glob("*@*.json")):
        stage, _, rank = path.stem.rpartition("@")
        touches[stage, int(rank)] = [Touch(*touch) for touch in read_json(path)]
    return touches
