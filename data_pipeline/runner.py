"""Builds the directory of a configuration, or finds it complete."""

import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from data_pipeline.config import DataConfig
from data_pipeline.contamination.testsets import find_gpt2_vocabulary, find_test_set
from data_pipeline.passes.overlap import measure_overlap
from data_pipeline.pipeline import Pipeline
from data_pipeline.publish import publish
from data_pipeline.reading.file_sources import FileSource
from data_pipeline.reading.sources import OpenedSources, open_sources
from data_pipeline.stages import STAGES
from data_pipeline.stages.stage import Stage
from data_pipeline.tokens.tokenizer import Tokenizer
from data_pipeline.work.executors import make_executor
from data_pipeline.work.tasks import NO_ROOM, disk_is_full
from data_pipeline.work.workspace import FOLDER, Workspace
from lineage.digest import sha256_file
from lineage.environment import available_cores
from lineage.errors import BadInput, DataMissing, Interrupted
from lineage.lock import locked
from lineage.progress import announce, format_bytes
from lineage.run import RunDirectory

ROOM_OF_A_DATASET, ROOM_OF_DOCUMENTS = 6, 3
"""Most disk space that the work takes, as a multiple of the input."""

Begin = Callable[[], RunDirectory]
Build = Callable[[Workspace, Path], None]


def build_dataset(config: DataConfig, root: Path, executor: str = "local") -> RunDirectory:
    """Build the dataset of `config` under `root`, or return it at once, saying so, if it is complete there.

    Finished tasks stay in a hidden directory of the run until all are done, and the same call continues from there
    after any interruption. Nothing is left after bad input. Raises BadInput for input or a root that cannot be used,
    DataMissing for missing input, Interrupted when stopped.
    """
    begin = partial(RunDirectory.begin, root, config.name, "data", config.identity())
    return _run_stages(config.stages, config, begin, executor, ROOM_OF_A_DATASET)


def run_stage(stage: type[Stage], config: DataConfig, out: Path, executor: str = "local") -> RunDirectory:
    """Run one stage over the sources of `config` into the directory `out`, as `build_dataset` does with all stages."""
    sections = {"sources", "seed", "shard_bytes", stage.name} | ({"tokenizer"} if stage.needs_tokenizer else set())
    values = config.model_dump(mode="json", include=sections)
    begin = partial(RunDirectory.begin_at, out, f"data-{stage.verb}", values)
    return _run_stages((stage.name,), config, begin, executor, ROOM_OF_DOCUMENTS)


def run_overlap(config: DataConfig, out: Path, executor: str = "local") -> RunDirectory:
    """Measure how much of the test sets the sources of `config` contain, into `overlap.json` in `out`."""
    test_sets = {name: find_test_set(name).resolve() for name in config.overlap.test_sets}
    sources, _, parents = _open(config, (), 0)
    parents |= {f"test set {name}": sha256_file(path) for name, path in test_sets.items()}
    values = config.model_dump(mode="json", include={"sources", "overlap"})

    def build(workspace: Workspace, directory: Path) -> None:
        measure_overlap(config, sources, test_sets, workspace, directory)

    return _complete(partial(RunDirectory.begin_at, out, "data-overlap", values, parents), build, config, executor, 0)


def _run_stages(
    names: tuple[str, ...], config: DataConfig, begin: Callable[..., RunDirectory], executor: str, room: int
) -> RunDirectory:
    """Run these stages in the directory that `begin` makes of the digests of what is read."""
    sources, test_sets, parents = _open(config, names, room)

    def build(workspace: Workspace, directory: Path) -> None:
        publish(Pipeline(config, names, sources, test_sets, workspace, parents.get("tokenizer", "")).run(), directory)

    preload = ["data_pipeline.fast.ready"] if {"clean", "language"} <= set(names) else []
    return _complete(partial(begin, parents), build, config, executor, room * sources.total_bytes, preload)


def _open(
    config: DataConfig, stages: tuple[str, ...], room: int
) -> tuple[OpenedSources, dict[str, Path | None], dict[str, str]]:
    """Open the sources and test sets, and compute the digests of all input; print the cost first."""
    sources = announce_cost(config, room)
    if "deduplicate" in stages:
        paths = config.deduplicate.against
        sources.compared = tuple(FileSource(f"documents:{path}", is_compared=True) for path in paths)
    wanted = config.decontaminate.test_sets if "decontaminate" in stages else ()
    test_sets = {name: _find_or_none(name) for name in wanted}
    needs_tokenizer = any(stage.needs_tokenizer for stage in STAGES if stage.name in stages)
    parents = {}
    if needs_tokenizer and config.tokenizer.origin in ("gpt2", "path"):
        path = config.tokenizer.path
        tokenizer = (
            Tokenizer.open(path, config.tokenizer.end_of_text)
            if path
            else Tokenizer.from_gpt2_files(*find_gpt2_vocabulary())
        )
        parents["tokenizer"] = tokenizer.digest
        if path and (change := tokenizer.changes()):
            print(f"WARNING: {path} does not keep every text: {change}", file=sys.stderr)
    for name, path in test_sets.items():
        parents[f"test set {name}"] = sha256_file(path) if path else "missing"
    return sources, test_sets, sources.fingerprints() | parents


def announce_cost(config: DataConfig, room: int = ROOM_OF_A_DATASET) -> OpenedSources:
    """Open the sources, and print what it costs to read them; `room` is a multiple of their size."""
    sources = open_sources(config.sources, config.seed)
    announce(
        f"reads about {format_bytes(sources.total_bytes)} of text",
        f"processes: {config.workers or available_cores()}",
        f"up to {format_bytes(room * sources.total_bytes)} of disk while it works" if room else "",
    )
    return sources


def _complete(
    begin: Begin, build: Build, config: DataConfig, executor: str, room: int, preload: Sequence[str] = ()
) -> RunDirectory:
    """Build in the locked directory of a run and seal it, or find it sealed. Workers import `preload` first.

    After bad input nothing is left of a run that this call began; a run that existed before stays.
    """
    run = begin()
    if run.is_at_rest and not (run.path / FOLDER).exists():
        return _found(run)
    work = run.path / FOLDER
    try:
        with locked(run.path):
            if run.is_complete:
                shutil.rmtree(work, ignore_errors=True)
                return _found(run)
            try:
                work.mkdir(mode=0o700, exist_ok=True)
                _check_room(run.path, work, room)
                with make_executor(executor, config.workers, preload) as place:
                    build(Workspace(work.resolve(), place), run.path)
                run.complete()
                shutil.rmtree(work)
            except BadInput:
                if run.is_new:
                    shutil.rmtree(work, ignore_errors=True)
                raise
            except OSError as error:
                if error.errno in NO_ROOM:
                    raise disk_is_full(work, error) from error
                raise Interrupted(f"{run.path} cannot be written: {error}; the same command continues") from error
    except BadInput:
        run.undo()
        raise
    return run


def _found(run: RunDirectory) -> RunDirectory:
    print(f"already complete: {run.path}", file=sys.stderr)
    run.link()
    return run


def _check_room(path: Path, work: Path, room: int) -> None:
    used = sum(file.stat().st_size for file in work.rglob("*") if file.is_file())
    free = shutil.disk_usage(path).free
    if room - used > free:
        raise BadInput(
            f"{path.parent} has {free / 1e9:,.1f} GB of free space, and the work may take {(room - used) / 1e9:,.1f} GB"
        )


def _find_or_none(name: str) -> Path | None:
    try:
        return find_test_set(name).resolve()
    except DataMissing as error:
        print(f"WARNING: no decontamination against {name}: {error}", file=sys.stderr)
        return None
