"""Builds the directory of a configuration, or finds it complete; says beforehand what that takes.

What is slow to import is imported when all input is known to be there.
"""

import contextlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import orjson

from mlm_repro.data_pipeline.config import WITHOUT, DataConfig
from mlm_repro.data_pipeline.contamination.testsets import find_gpt2_vocabulary, find_test_set
from mlm_repro.data_pipeline.document import Document
from mlm_repro.data_pipeline.earlier import DEAR, RECIPE, SHELF, Earlier, recipe_made_by
from mlm_repro.data_pipeline.files import LEDGER, Ledger
from mlm_repro.data_pipeline.reading.file_sources import FileSource
from mlm_repro.data_pipeline.reading.sources import OpenedSources, open_sources
from mlm_repro.data_pipeline.stages.stage import SOURCE, Stage
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.data_pipeline.work.executors.local import LocalExecutor
from mlm_repro.data_pipeline.work.executors.part import PartExecutor, parse_part
from mlm_repro.data_pipeline.work.executors.ray import RayExecutor
from mlm_repro.data_pipeline.work.meeting import MEETINGS, Meeting
from mlm_repro.data_pipeline.work.origin import SETTING, made_by
from mlm_repro.data_pipeline.work.tasks import NO_ROOM, disk_is_full
from mlm_repro.data_pipeline.work.workspace import FOLDER, Executor, Workspace
from mlm_repro.lineage.config import flatten, parse_config
from mlm_repro.lineage.digest import bytes_below, sha256_file
from mlm_repro.lineage.environment import available_cores
from mlm_repro.lineage.errors import BadInput, DataMissing, Interrupted, UserError
from mlm_repro.lineage.files import read_document
from mlm_repro.lineage.progress import announce, format_bytes, format_duration
from mlm_repro.lineage.run import MANIFEST, RunDirectory

ROOM_OF_A_DATASET, ROOM_OF_DOCUMENTS = 6, 3
"""Most disk space that the work takes, as a multiple of the input."""
TABLES = ("mlm_repro.data_pipeline.fast.ready",)
"""Functions that make the tables of cleaning and languages, called once before workers are forked."""
REHEARSED_BYTES, REHEARSED_TOKENS = 4 << 20, 300
"""Text on which a time is rehearsed, and the tokens of a vocabulary that is trained on it."""

Build = Callable[[Workspace, Path], dict[str, str]]
"""Fills the directory of a run; returns the SHA-256 of files that are known, by name."""


def build_dataset(config: DataConfig, root: Path, executor: str = "local", part: str = "") -> RunDirectory:
    """Build the dataset of `config` under `root`, or return it at once, saying so, if it is complete there.

    Finished tasks stay in a hidden directory of the run until all are done, and the same call continues from there
    after any interruption. What earlier builds of the same name made is used again as far as it is the same, and how
    they differ is printed. Of several machines each does its `part`, such as 2/8. Nothing is left after bad input.
    Raises BadInput for input or a root that cannot be used, and for a part that differs from one that is at work,
    DataMissing for missing input, Interrupted when stopped.
    """
    stated = config.model_dump(mode="json", exclude=WITHOUT)
    begin = partial(RunDirectory.begin, root, config.name, "data", stated, settings=config.identity())
    if not part:
        return _run_stages(config, begin, executor, ROOM_OF_A_DATASET, root)
    with Meeting(root / MEETINGS / config.name, *parse_part(part)) as meeting:
        settings = flatten(config.identity()) | {"shard_bytes": config.shard_bytes, "parts": meeting.parts}
        stated = {f"{SETTING}: {key}": str(value) for key, value in settings.items()}
        meeting.agree("work", stated | recipe_made_by(config, config.sources.names))
        return _run_stages(config, begin, executor, ROOM_OF_A_DATASET, root, meeting)


def run_stage(stage: type[Stage], config: DataConfig, out: Path, executor: str = "local") -> RunDirectory:
    """Run one stage over the sources of `config` into the directory `out`, as `build_dataset` does with all stages."""
    begin = partial(RunDirectory.begin_at, out, f"data-{stage.verb}", config.identity())
    return _run_stages(config, begin, executor, ROOM_OF_DOCUMENTS)


def run_overlap(config: DataConfig, out: Path, executor: str = "local") -> RunDirectory:
    """Measure how much of the test sets the sources of `config` contain, into `overlap.json` in `out`."""
    test_sets = {name: find_test_set(name).resolve() for name in config.overlap.test_sets}
    sources = announce_cost(config, 0)
    parents = sources.fingerprints() | {f"test set {name}": sha256_file(path) for name, path in test_sets.items()}
    parents |= made_by([SOURCE, "decontaminate", "overlap"], {name.partition(":")[0] for name in sources.names})
    values = config.model_dump(mode="json", include={"sources", "overlap"}, exclude_defaults=True)

    def build(workspace: Workspace, directory: Path) -> dict[str, str]:
        from mlm_repro.data_pipeline.passes.overlap import measure_overlap

        measure_overlap(config, sources, test_sets, workspace, directory)
        return {}

    return _complete(RunDirectory.begin_at(out, "data-overlap", values, parents), build, _workers(executor, config), 0)


def announce_cost(config: DataConfig, room: int = ROOM_OF_A_DATASET) -> OpenedSources:
    """Open the sources, and print what it costs to read them; `room` is a multiple of their size."""
    sources = open_sources(config.sources, config.seed)
    announce(
        f"reads about {format_bytes(sources.total_bytes)} of text",
        f"processes: {config.workers or available_cores()}",
        f"up to {format_bytes(room * sources.total_bytes)} of disk while it works" if room else "",
    )
    return sources


def forecast(config: DataConfig, root: Path) -> None:
    """Print the cost of a build, what it would use again, and the time of the rest, rehearsed on the first text."""
    sources = announce_cost(config)
    earlier = Earlier(root, config, recipe_made_by(config, sources.names))
    offer = next(iter(earlier.offers()), None)
    reused = offer.stages if offer else []
    try:
        seconds = _rehearse(config, sources, reused) * sources.total_bytes / (config.workers or available_cores())
        said = f"about {format_duration(seconds)} by a rehearsal on the first {format_bytes(REHEARSED_BYTES)}"
    except UserError as error:
        said = f"no time: {error}"
    announce(said)
    earlier.say(earlier.alike(), offer)


def _rehearse(config: DataConfig, sources: OpenedSources, reused: list[str]) -> float:
    """Seconds of one process for a byte of text, without the stages that are used again.

    Two builds are made, and the first, small one only prepares. Raises UserError where that cannot be.
    """
    local = [source for source in sources.sources if isinstance(source, FileSource)]
    if len(local) < len(sources.sources):
        raise BadInput("only local files are rehearsed")
    values = config.model_dump(mode="json", exclude={"sources"}) | {"workers": 1}
    if "deduplicate" in config.stages:
        values["deduplicate"]["against"] = []
    if config.tokenizer.origin in ("train", "words"):
        values["tokenizer"]["vocab_size"] = REHEARSED_TOKENS
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
        for size in (REHEARSED_BYTES >> 4, REHEARSED_BYTES):
            place = Path(name, f"{size}.jsonl")
            with place.open("wb") as file:
                for item in chain.from_iterable(source.sample() for source in local):
                    if isinstance(item, Document):
                        file.write(orjson.dumps({"text": item.text}, option=orjson.OPT_APPEND_NEWLINE))
                    if file.tell() >= size:
                        break
            sample = values | {"sources": {"names": [f"jsonl:{place}"]}}
            run = build_dataset(parse_config(sample, DataConfig, "the rehearsal"), Path(name))
        ledger = read_document(run.path / LEDGER, Ledger)
        return sum(stage.seconds for stage in ledger.stages if stage.name not in reused) / place.stat().st_size


def _run_stages(
    config: DataConfig, begin: Callable[..., RunDirectory], executor: str, room: int, root: Path | None = None,
    meeting: Meeting | None = None,
) -> RunDirectory:  # fmt: skip
    """Run the stages of `config` in the directory, below `root`, that `begin` makes of the digests of what is read."""
    sources, test_sets, parents = _open(config, room)
    if meeting:
        meeting.agree("input", parents)

    def build(workspace: Workspace, directory: Path) -> dict[str, str]:
        from mlm_repro.data_pipeline.pipeline import Pipeline
        from mlm_repro.data_pipeline.publish import publish

        pipeline = Pipeline(config, sources, test_sets, workspace, parents).run()
        if isinstance(workspace.executor, PartExecutor):
            if workspace.executor.meeting.part > 1:
                return {}
            workspace.executor = workspace.executor.workers
        return publish(pipeline, directory)

    run = begin(parents)
    earlier = Earlier(root, config, parents, run.path.name) if root else None
    return _complete(run, build, _workers(executor, config), room * sources.total_bytes, earlier, meeting)


def _workers(executor: str, config: DataConfig) -> LocalExecutor | RayExecutor:
    """The executor of that name, its processes with the tables of cleaning and languages where both stages run."""
    if executor == "ray":
        return RayExecutor(config.workers)
    return LocalExecutor(config.workers, TABLES if {"clean", "language"} <= {*config.stages} else ())


def _open(config: DataConfig, room: int) -> tuple[OpenedSources, dict[str, Path | None], dict[str, str]]:
    """Open sources and test sets; print the cost; digests of all input, and of the code and libraries that are run."""
    sources = announce_cost(config, room)
    parents = recipe_made_by(config, sources.names)
    if "deduplicate" in config.stages:
        paths = config.deduplicate.against
        sources.compared = tuple(FileSource(f"documents:{path}", is_compared=True) for path in paths)
    wanted = config.decontaminate.test_sets if "decontaminate" in config.stages else ()
    test_sets = {name: _find_or_none(name) for name in wanted}
    path, end_of_text = config.tokenizer.path, config.tokenizer.end_of_text
    if config.needs_tokenizer and path:
        tokenizer = Tokenizer.open(path, end_of_text)
        parents["tokenizer"] = tokenizer.digest
        if change := tokenizer.changes():
            print(f"warning: {path} does not keep every text: {change}", file=sys.stderr)
    elif config.needs_tokenizer and config.tokenizer.kind == "gpt2":
        parents["tokenizer"] = Tokenizer.from_gpt2_files(*find_gpt2_vocabulary()).digest
    for name, place in test_sets.items():
        parents[f"test set {name}"] = sha256_file(place) if place else "missing"
    return sources, test_sets, sources.fingerprints() | parents


def _complete(
    run: RunDirectory, build: Build, workers: LocalExecutor | RayExecutor, room: int, earlier: Earlier | None = None,
    meeting: Meeting | None = None,
) -> RunDirectory:  # fmt: skip
    """Build in the locked directory of a run and seal it, or find it sealed.

    All parts but the first work in the directory without its lock, and end when it is sealed.
    """
    work = run.path / FOLDER
    if run.is_at_rest and not work.exists():
        return _found(run)
    place = PartExecutor(workers, meeting, lambda: run.is_complete) if meeting else workers
    if meeting and meeting.part > 1:
        return _help(run, build, place, meeting, room)
    shelf = earlier.root / SHELF / earlier.config.name if earlier else None
    with run.filled():
        if run.is_complete:
            shutil.rmtree(work, ignore_errors=True)
            return _found(run)
        if earlier:
            earlier.take_over(work, is_alone=meeting is None)
        try:
            with _workspace(run, place, room) as workspace:
                run.complete(build(workspace, run.path))
                shutil.copyfile(run.path / MANIFEST, work / RECIPE)
                _put_away(work, shelf)
        except BadInput:
            if run.is_new:
                _put_away(work, shelf)
            raise
    return run


def _help(run: RunDirectory, build: Build, place: Executor, meeting: Meeting, room: int) -> RunDirectory:
    """Do a part of the work, which the first part begins, until the first part has sealed the run."""
    work = run.path / FOLDER
    try:
        meeting.wait_for(lambda: work.exists() or run.is_complete or None, 1, lambda: "it did not begin")
        if not run.is_complete:
            with _workspace(run, place, room) as workspace:
                build(workspace, run.path)
                meeting.wait_for(lambda: run.is_complete or None, 1, lambda: "the dataset is being written")
    except UserError:
        if not run.is_complete:
            raise
    return run


@contextlib.contextmanager
def _workspace(run: RunDirectory, place: Executor, room: int) -> Iterator[Workspace]:
    """The workspace of a run, with a disk that is full or fails told as one sentence."""
    work = run.path / FOLDER
    try:
        work.mkdir(mode=0o700, exist_ok=True)
        free, needed = shutil.disk_usage(run.path).free, room - bytes_below(work)
        if needed > free:
            has = f"{run.path.parent} has {free / 1e9:,.1f} GB of free space"
            raise BadInput(f"{has}, and the work may take {needed / 1e9:,.1f} GB")
        with place:
            yield Workspace(work.resolve(), place)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise disk_is_full(work, error) from error
        raise Interrupted(f"{run.path} cannot be written: {error}; the same command continues") from error


def _put_away(work: Path, shelf: Path | None) -> None:
    """Remove the work of a run that has ended; dear stages of a complete one are kept for the next of that name."""
    if shelf and (work / RECIPE).is_file():
        for path in work.iterdir():
            if not path.name.startswith((*DEAR, RECIPE)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree(shelf, ignore_errors=True)
        shelf.parent.mkdir(exist_ok=True)
        os.replace(work, shelf)
    shutil.rmtree(work, ignore_errors=True)


def _found(run: RunDirectory) -> RunDirectory:
    print(f"already complete: {run.path}", file=sys.stderr)
    run.link()
    return run


def _find_or_none(name: str) -> Path | None:
    try:
        return find_test_set(name).resolve()
    except DataMissing as error:
        print(f"warning: no decontamination against {name}: {error}", file=sys.stderr)
        return None
