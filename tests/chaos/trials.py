"""Faults tried one by one: strike, start again, compare with what comes out undisturbed."""

import contextlib
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from mlm_repro.data_pipeline.runner import SHELF
from mlm_repro.lineage.chain import INDEX, complete_checkpoints
from mlm_repro.lineage.digest import MARKER, check_seal, content_digest, is_sealed, sealed_files
from mlm_repro.lineage.environment import available_cores
from mlm_repro.lineage.files import read_object
from mlm_repro.lineage.progress import Progress
from tests.chaos.faults import FAULTS, MEANWHILE, STRUCK, Fault, Touch
from tests.chaos.job import (
    NO_TRACEBACK,
    RANKS,
    read_touches,
    start_job,
    wait_for,
    warm_up,
    write_tiny,
)
from tests.golden.digests import of_json, of_reproduction

TIMEOUT_SECONDS = 900.0
"""Most time of a job; one that takes longer hangs."""
NO_ANSWER = "the command beside it ended with"
INPUTS = {
    "data": "corpus.jsonl",
    "train": "runs/tiny-*/train_text_document.bin",
    "eval": "runs/355m-tiny-*/checkpoints/iter_0000006/model-tp00-*.safetensors",
    "records": "runs/355m-tiny-*/summary.json",
    "report": "runs/reproduce-355m-*/records.jsonl",
}
"""What a stage reads, and may lose or find changed."""
STAGES = {"data": "data", "train": "train", "records": "evaluate", "report": "report"}
"""Stage of the table for each process; `eval …` is `evaluate`."""


@dataclass(frozen=True)
class Trial:
    """What was tried and what became of it."""

    fault: Fault
    exit_code: int
    """Of the disturbed command; negative for a signal."""
    failure: str
    """Why the fault was not survived, in words; empty where it was."""
    seconds: float

    @property
    def stage(self) -> str:
        """Stage of the reproduction in which it struck."""
        return STAGES.get(self.fault.stage, "evaluate")


@dataclass(frozen=True)
class Reference:
    """The undisturbed run: how each stage found its folder, the points passed, the result, the
    tensors trained."""

    notes: Path
    touches: dict[tuple[str, int], list[Touch]]
    result: dict[str, str]
    tensors: list[str]
    iterations: int


def prepare(work: Path) -> Reference:
    """Warm this process up and run everything undisturbed, twice: a table of the page that differs
    shows times."""
    results = []
    for name in ("warm", "first", "second"):
        place, notes = work / name, work / f"notes-{name}"
        for folder in (place, notes):
            folder.mkdir(parents=True)
        write_tiny(place)
        if name == "warm":
            warm_up(place)
            continue
        (code,) = wait_for([start_job(place, work / f"{name}.log", None, notes)], TIMEOUT_SECONDS)
        if code:
            raise RuntimeError(
                f"the undisturbed run failed: {(work / f'{name}.log').read_text()[-2000:]}"
            )
        results.append(outcome(place / "runs"))
    result = {name: digest for name, digest in results[0].items() if digest == results[1][name]}
    if different := sorted(
        name for name in results[0].keys() - result.keys() if not name.startswith("table ")
    ):
        raise RuntimeError(f"two undisturbed runs differ: {', '.join(different)}")
    final = complete_checkpoints((work / "first" / "runs" / "355m-tiny").resolve())[-1]
    names = [
        name for name in read_object(final / INDEX) if not name.startswith(("exp_avg", "master"))
    ]
    iterations = int(final.name.removeprefix("iter_"))
    return Reference(
        work / "notes-first", read_touches(work / "notes-first"), result, names, iterations
    )


def outcome(runs: Path) -> dict[str, str]:
    """Digests of what the reproduction must come to, whatever happened on the way; every seal is
    checked.

    Raises IntegrityFailure or OSError where something is missing or changed. Which checkpoints are
    kept depends on where training was stopped, so that the last one alone counts.
    """
    for name in ("tiny", "355m-tiny", "reproduce-355m"):
        if not (runs / name).is_symlink():
            raise FileNotFoundError(2, "no link to the newest run", str(runs / name))
    for marker in sorted(runs.rglob(MARKER)):
        if is_sealed(marker.parent) and "/." not in f"/{marker.relative_to(runs)}":
            check_seal(marker.parent)
    digests = {
        name: digest
        for name, digest in of_reproduction(runs).items()
        if not name.startswith("weights ")
    }
    final = complete_checkpoints((runs / "355m-tiny").resolve())[-1]
    others = {name for name in sealed_files(final) if not name.endswith(".safetensors")}
    page = (runs / "reproduce-355m").resolve() / "report"
    files = sorted(str(path.relative_to(page)) for path in page.rglob("*") if path.is_file())
    return digests | {
        "weights": f"{final.name} {content_digest(final, without=others)}",
        "page": of_json(files),
    }


def leftovers(place: Path) -> list[str]:
    """Hidden files and directories of unfinished work; what the next build uses again is no such
    thing."""
    hidden = {*(place / "runs").rglob(".*")} - {place / "runs" / SHELF}
    return sorted(str(path.relative_to(place)) for path in hidden)


def every_fault(reference: Reference, kinds: Sequence[str]) -> list[Fault]:
    """Each of these kinds of fault at each point where it can happen, NaN in each tensor.

    Points whose files are written by the same lines are one, tried at the middle one: those that
    differ in numbers alone, as of successive checkpoints, those of the stages of the data pipeline,
    and figures of one format.
    """
    alike: dict[tuple[str, int, str, str], list[Fault]] = {}
    for fault in _strikes(reference):
        alike.setdefault((fault.stage, fault.rank, fault.what, fault.name), []).append(fault)
    found = [faults[len(faults) // 2] for faults in alike.values()] + _nan_faults(reference)
    return [fault for fault in found if fault.name in kinds]


def some_faults(reference: Reference, count: int, seed: int, kinds: Sequence[str]) -> list[Fault]:
    """A sample of all points, the repeated ones too: of each stage in turn, and of each kind of
    fault in turn."""
    draw = random.Random(seed)
    pools: dict[tuple[str, str], list[Fault]] = {}
    for fault in _strikes(reference):
        pools.setdefault((STAGES.get(fault.stage, "evaluate"), fault.name), []).append(fault)
    pools["train", "NaN"] = _nan_faults(reference)
    turns = sorted(turn for turn in pools if turn[1] in kinds)
    draw.shuffle(turns)
    return [draw.choice(pools[turns[number % len(turns)]]) for number in range(count)]


def _strikes(reference: Reference) -> Iterator[Fault]:
    """Each kind of fault at each point where it can happen."""
    for (stage, rank), touches in reference.touches.items():
        for number, touch in enumerate(touches):
            what = f"{touch.kind} {_pattern(touch.path)}"
            yield from (
                Fault(stage, rank, number, name, what)
                for name, kinds in FAULTS.items()
                if touch.kind in kinds
            )


def _nan_faults(reference: Reference) -> list[Fault]:
    return [
        Fault("train", number % RANKS, 1 + number % (reference.iterations - 1), "NaN", name)
        for number, name in enumerate(reference.tensors)
    ]


def _pattern(path: str) -> str:
    """The path without what differs from run to run and from one task, checkpoint, figure or entry
    to the next."""
    path = re.sub(r"/\.work/\w+(?=/)", "/.work/*", path)
    path = re.sub(r"(partial|old|link)-\d+", r"\1", path)
    path = re.sub(r"/figures/[^/]+(?=\.\w+$)", "/figures/*", re.sub(r"/band-\d+", "/band-#", path))
    return re.sub(
        r"-[0-9a-f]{8}(?=[/.]|$)|[0-9a-f]{32}|tmp\w{8}", "-#", re.sub(r"\d{5,}", "#", path)
    )


def run_trials(
    reference: Reference, faults: Sequence[Fault], work: Path, jobs: int | None = None
) -> Iterator[Trial]:
    """Try each fault in a folder of its own, as many at once as there are cores; in the order in
    which they end."""
    context = get_context("fork")
    cores = sorted(os.sched_getaffinity(0))[: jobs or available_cores()]
    free = context.SimpleQueue()
    for core in cores:
        free.put(core)
    with (
        Progress("chaos", len(faults), "faults") as progress,
        ProcessPoolExecutor(
            len(cores), context, lambda: os.sched_setaffinity(0, {free.get()})
        ) as pool,
    ):
        places = (work / f"trial-{number:04d}" for number in range(len(faults)))
        tried = [pool.submit(_try, reference, *each) for each in zip(faults, places, strict=True)]
        try:
            for done in as_completed(tried):
                progress.advance()
                yield done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _try(reference: Reference, fault: Fault, place: Path) -> Trial:
    """Strike in a copy of what the stage found, give the same command again, and compare."""
    start = time.monotonic()
    here = place / "place"
    shutil.copytree(reference.notes / fault.stage, here, symlinks=True)
    before, codes, lost = _files(here), [], set[Path]()
    logs = [place / f"{name}.log" for name in ("disturbed", "again", "other")]
    for log, planned in zip(logs, (fault, None), strict=False):
        job = start_job(here, log, planned)
        mend = (
            _meanwhile(here, planned, job, logs[2])
            if planned and planned.name in MEANWHILE
            else None
        )
        codes.append(wait_for([job], TIMEOUT_SECONDS)[0])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job, signal.SIGKILL)
        if mend:
            mend()
        lost |= before - _files(here)
    gone = f"missing: {', '.join(sorted(map(str, lost))[:3])}"
    failure = gone if lost else _failure(reference, here, codes, logs)
    trial = Trial(fault, codes[0], failure, round(time.monotonic() - start, 3))
    if not trial.failure:
        shutil.rmtree(place)
    return trial


def _files(here: Path) -> set[Path]:
    """What a user has there: inputs and results, without the hidden files of work."""
    found = (path.relative_to(here) for path in here.rglob("*") if path.is_file())
    return {
        path
        for path in found
        if path.parts[0] != "cache" and not any(part.startswith(".") for part in path.parts)
    }


def _meanwhile(here: Path, fault: Fault, job: int, log: Path) -> Callable[[], object]:
    """Once the job has stopped itself, do beside it what the fault says and let it go on; returns
    what mends that."""
    while not (here.parent / STRUCK).exists():
        if os.waitid(os.P_PID, job, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return lambda: None
        time.sleep(0.01)
    mend: Callable[[], object] = lambda: None  # noqa: E731
    if fault.name == "other":
        if (
            code := wait_for([other := start_job(here, log, None)], TIMEOUT_SECONDS)[0]
        ) not in range(8):
            log.write_text(
                f"{NO_ANSWER} {code}\n{log.read_text(encoding='utf-8')}", encoding="utf-8"
            )
        with contextlib.suppress(ProcessLookupError):
            os.killpg(other, signal.SIGKILL)
    else:
        (path,) = here.glob(INPUTS[fault.stage.split()[0]])
        aside = here.parent / "aside"
        if fault.name == "gone":
            path.rename(aside)
        else:
            shutil.copy2(path, aside)
            path.write_bytes(
                bytes(byte ^ (number % 100 == 10) for number, byte in enumerate(aside.read_bytes()))
            )
        mend = partial(os.replace, aside, path)
    os.killpg(job, signal.SIGCONT)
    return mend


def _failure(reference: Reference, here: Path, codes: list[int], logs: list[Path]) -> str:
    texts = [log.read_text(encoding="utf-8", errors="replace") for log in logs if log.exists()]
    if texts[-1].startswith(NO_ANSWER):
        return texts[-1].splitlines()[0]
    if codes[0] == NO_TRACEBACK or any(
        "Traceback (most recent call last)" in text for text in texts
    ):
        return "a traceback was shown"
    if codes[0] not in (*range(8), -signal.SIGKILL, -signal.SIGTERM):
        return f"the disturbed command ended with {codes[0]}"
    if codes[1]:
        return f"the same command again ended with {codes[1]}: {texts[1].strip().splitlines()[-1:]}"
    try:
        actual = outcome(here / "runs")
    except Exception as error:  # whatever it is, the result is not what it should be
        return f"the result cannot be read: {error!r}"
    if different := [
        stage for stage, digest in reference.result.items() if actual.get(stage) != digest
    ]:
        return f"the result differs: {', '.join(different)}"
    if left := leftovers(here):
        return f"left behind: {', '.join(left[:3])}"
    return ""
