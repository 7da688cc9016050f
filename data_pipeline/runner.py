"""Builds the directory of a recipe, or finds it complete, and prints beforehand what the work
takes.

Modules that are slow to import are imported when all input is known to be there.
"""

import contextlib
import io
import math
import os
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlm_repro.data_pipeline.arrays import Integers
from mlm_repro.data_pipeline.config import BY_NAME, WITHOUT, DataConfig
from mlm_repro.data_pipeline.contamination.testsets import find_gpt2_vocabulary, find_test_set
from mlm_repro.data_pipeline.document import Document, json_line
from mlm_repro.data_pipeline.reading.file_sources import FileSource
from mlm_repro.data_pipeline.reading.sources import OpenedSources, open_sources
from mlm_repro.data_pipeline.stages import own_code
from mlm_repro.data_pipeline.stages.stage import SOURCE, Stage
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.data_pipeline.work.executors.local import LocalExecutor
from mlm_repro.data_pipeline.work.executors.part import PartExecutor, parse_part
from mlm_repro.data_pipeline.work.executors.ray import RayExecutor
from mlm_repro.data_pipeline.work.meeting import MEETINGS, Meeting
from mlm_repro.data_pipeline.work.origin import made_by
from mlm_repro.data_pipeline.work.tasks import MARKER, NO_ROOM
from mlm_repro.data_pipeline.work.workspace import FOLDER, Executor, Workspace
from mlm_repro.lineage.atomic import JSON, read_json
from mlm_repro.lineage.config import flatten, parse_config
from mlm_repro.lineage.digest import bytes_below, sha256_file
from mlm_repro.lineage.environment import available_cores
from mlm_repro.lineage.errors import BadInput, DataMissing, Interrupted, UserError
from mlm_repro.lineage.files import Manifest
from mlm_repro.lineage.progress import announce, format_bytes, format_duration
from mlm_repro.lineage.run import RunDirectory

SHELF = ".stages"
"""Folder beside the runs that keeps, for each name, task results of the last complete build."""
DEAR = ("harvest", "prepare", "tokenizer", "measure")
"""Beginnings of the names of stages whose results are kept in SHELF, because they took long."""
ROOM_OF_A_DATASET = 6
"""Largest disk space that the work of a dataset takes, as a multiple of the input."""
ROOM_OF_DOCUMENTS = 3
"""Largest disk space that the work of a verb takes, as a multiple of the input."""
ROOM_OF_SMALL_TOKENS = 3
"""Added to ROOM_OF_A_DATASET for a small vocabulary, where a token may be a byte."""
SMALL_VOCABULARY = 8192
RECORD_BYTES = 300
"""Bytes of disk that a document takes beside text and fingerprints."""
DOCUMENT_BYTES = 48
"""Bytes of memory that a document takes beside text and fingerprints."""
COMPARISON_SECONDS = 1.2e-8
"""Seconds to compare the sketches of two documents that are not alike."""
OFFER_SECONDS = 7e-8
"""Seconds to look at one document that a bucket offers for comparison, where the sketches exceed
the processor's cache."""
CACHE_BYTES = 80 << 20
"""Bytes by which a process's tables of words and shingles may still grow after a rehearsal."""
REST = "the rest"
"""Name of the work that no stage of the ledger counts: the loading of code, tokens without a filter
of tokens, selection, and the writing of a dataset."""
LARGER = (174 * 10**9, 10**12, 10**13)
"""Sizes, in bytes, of larger corpora for which a forecast is printed too."""
STAGE_OF = {
    "prepare": SOURCE,
    "matches.jsonl": "decontaminate",
    "ngrams": "decontaminate",
    "select": "decontaminate",
    "order": "split",
    **dict.fromkeys(
        (
            "fingerprints.bin",
            "digests.bin",
            "copies",
            "fingerprints",
            "link",
            "components",
            "resolve",
            "decisions",
        ),
        "deduplicate",
    ),
}
"""Dict from the name of a file or a folder of a workspace to the stage that its bytes on disk are
counted for; all others count for the recipe's last stage."""
TABLES = ("mlm_repro.data_pipeline.fast.ready",)
"""Modules that make the tables of cleaning and languages when they are imported, before workers are
forked."""
REHEARSED_BYTES = 4 << 20
"""Bytes of text in the sample that a rehearsal builds."""
REHEARSED_TOKENS = 300
"""Largest vocabulary size of a tokenizer whose training is rehearsed: the smallest samples give no
more tokens."""

Build = Callable[[Workspace], Callable[[Path], dict[str, str] | None]]
"""A function that runs the tasks in a workspace and returns another. That one fills the directory
of a run, and returns the SHA-256 of the files that it knows, by name, or None."""


def build_dataset(
    config: DataConfig, root: Path, executor: str = "local", part: str = ""
) -> RunDirectory:
    """Build the dataset of `config` under `root` and return its RunDirectory. The cost is printed
    to standard error first; if the dataset is complete under `root`, a note follows, and nothing is
    built.

    Finished tasks stay in a hidden directory of the run until all are done, and the same call
    continues from there after any interruption. A task of the slow stages, those of DEAR, that the
    last complete build of this dataset's name did too is not done again. With `part`, such as 2/8,
    this machine does that part of the tasks, and other machines with the same call and `root` do
    the rest. After bad input, a run that this call began leaves nothing but a list of malformed
    lines, if there were too many. `executor` is "local" or "ray". Raises BadInput for input or a
    root that cannot be used, for "ray" if it is not installed, and for a part that differs from one
    that is at work; DataMissing for missing input; IntegrityFailure for input from another dataset
    that is not as it was sealed; Interrupted when stopped, and for a lost worker, a full disk or a
    server that does not answer.
    """
    stated = config.model_dump(mode="json", exclude=WITHOUT)
    begin = partial(
        RunDirectory.begin, root, config.name, "data", stated, settings=config.identity()
    )
    shelf = root / SHELF / config.name
    run_stages = partial(_run_stages, config, begin, executor, ROOM_OF_A_DATASET, shelf)
    if not part:
        return run_stages()
    with Meeting(root / MEETINGS / config.name, *parse_part(part)) as meeting:
        settings = flatten(stated) | {"shard_bytes": config.shard_bytes, "parts": meeting.parts}
        meeting.agree({key: str(value) for key, value in settings.items()} | _made_by(config))
        return run_stages(meeting)


def run_stage(
    stage: type[Stage], config: DataConfig, out: Path, executor: str = "local"
) -> RunDirectory:
    """Run the one stage of `config`, a recipe whose `stages` has only the name of the class
    `stage`, over the recipe's sources into the directory `out` and return its RunDirectory, whose
    kind is `data-` and the stage's verb. The cost is printed to standard error first; if the work
    is complete in `out`, a note follows, and nothing is run. `executor` is "local" or "ray". The
    same call continues after an interruption. Raises BadInput for input or a directory that cannot
    be used, and for "ray" if it is not installed; DataMissing for missing input; IntegrityFailure
    for input from another dataset that is not as it was sealed; Interrupted when stopped, and for a
    lost worker, a full disk or a server that does not answer."""
    begin = partial(RunDirectory.begin_at, out, f"data-{stage.verb}", config.identity())
    return _run_stages(config, begin, executor, ROOM_OF_DOCUMENTS)


def run_overlap(config: DataConfig, out: Path, executor: str = "local") -> RunDirectory:
    """Measure the share of the test sets' n-grams that the sources of `config` contain, write it to
    `overlap.json` in `out`, and return the RunDirectory. `config.overlap` names the test sets. If
    the run is complete in `out`, print a note to standard error and return its RunDirectory at
    once. The cost is printed to standard error first. `executor` is "local" or "ray". Raises
    DataMissing for a test set or a source that cannot be found, BadInput for input or a directory
    that cannot be used and for "ray" if it is not installed, IntegrityFailure for input from a
    dataset that is not as it was sealed. Raises Interrupted when stopped, and for a lost worker, a
    full disk or a server without an answer."""
    test_sets = {name: find_test_set(name).resolve() for name in config.overlap.test_sets}
    sources, _ = announce_cost(config, 0)
    digests = {f"test set {name}": sha256_file(path) for name, path in test_sets.items()}
    parents = sources.fingerprints() | digests | made_by()
    values = config.model_dump(mode="json", include={"sources", "overlap"}, exclude_defaults=True)

    def build(workspace: Workspace) -> Callable[[Path], None]:
        from mlm_repro.data_pipeline.passes.overlap import measure_overlap

        return partial(measure_overlap, config, sources, test_sets, workspace)

    return _complete(
        RunDirectory.begin_at(out, "data-overlap", values, parents),
        build,
        _workers(executor, config),
        0,
    )


def announce_cost(config: DataConfig, room: int = ROOM_OF_A_DATASET) -> tuple[OpenedSources, int]:
    """Open the recipe's sources and print to standard error, except with `--quiet`, the size of
    their text, the number of processes and the largest disk space that the work takes. Returns the
    opened sources and that space in bytes. Raises BadInput for a source without files, DataMissing
    for one that is not to be had, IntegrityFailure for an incomplete directory of `documents`, and
    Interrupted if a server or the hub cannot be asked.

    `room` is that space as a multiple of the sources' size, to which a small vocabulary and the
    search for near-duplicates add; 0 stands for work that takes no disk.
    """
    sources = open_sources(config.sources, config.seed)
    if "tokenize" in config.stages and room and config.tokenizer.vocab_size < SMALL_VOCABULARY:
        room += ROOM_OF_SMALL_TOKENS
    needed = room * sources.total_bytes
    if room and "deduplicate" in config.stages:
        fingerprint = 8 * config.deduplicate.banding[0] + config.deduplicate.num_permutations
        needed += (2 * fingerprint + RECORD_BYTES) * sources.documents
    announce(
        f"reads about {format_bytes(sources.total_bytes)} of text",
        f"processes: {config.workers or available_cores()}",
        f"up to {format_bytes(needed)} of disk while it works" if room else "",
    )
    return sources, needed


class Promise(NamedTuple):
    """Predicted cost of building a dataset: the number of `documents`; `seconds` and `disk`, dicts
    from the name of a stage to its seconds and to its bytes on disk, where `seconds` has other work
    under `REST`; and `memory`, the peak bytes of all processes together."""

    documents: int
    seconds: dict[str, float]
    """Dict from each stage to its seconds on an otherwise idle machine."""
    memory: int
    """Peak bytes of all processes together."""
    disk: dict[str, float]
    """Dict from each stage to its bytes on disk while the work lasts."""


def promise(
    config: DataConfig, sources: OpenedSources, rehearsed: "Rehearsed", size: int
) -> Promise:
    """Return the Promise for a build of `size` bytes of text by the recipe `config` and its number
    of processes, by default one for each core: the predicted number of documents, dicts of each
    stage's seconds and of its bytes on disk, and the peak bytes of memory of all processes
    together. `rehearsed` is the measured cost of a sample of the same `sources`. Documents and disk
    are in proportion to `size`; seconds grow with it, but not in proportion. Memory grows up to the
    size of a slice, beyond it only if `config` has the stage `deduplicate`.

    The number of compared pairs that are not alike grows with the square of the number of
    documents, up to the limit of documents that a bucket offers.
    """
    from mlm_repro.data_pipeline.duplicates.similarity import MOST_REMEMBERED
    from mlm_repro.data_pipeline.passes.gather import slice_documents

    workers = config.workers or available_cores()
    documents = round(size / sources.total_bytes * sources.documents)
    times = documents / rehearsed.documents
    (fewer, before, *_), (many, after, counted, _, gathered) = rehearsed.took
    rates = {
        name: max(0.0, after[name] - before[name]) / ((many - fewer) or math.inf) for name in after
    }
    seconds = {
        name: max(0.0, before[name] - rate * fewer) + rate * documents / workers
        for name, rate in rates.items()
    }
    grown = max(0.0, min(documents, slice_documents(documents, size)) / rehearsed.documents - 1)
    memory = workers * (rehearsed.memory + CACHE_BYTES + round(grown * gathered))
    if "deduplicate" in seconds:
        seconds["deduplicate"] += _crowded(rehearsed, times) / workers
        keys = counted["members"] / rehearsed.documents * rehearsed.bytes
        memory += round(8 * max(0, min(workers * MOST_REMEMBERED, times * keys) - keys))
        memory += DOCUMENT_BYTES * documents
    return Promise(
        documents,
        seconds,
        memory,
        {name: times * size_of_stage for name, size_of_stage in rehearsed.disk.items()},
    )


def _crowded(rehearsed: "Rehearsed", times: float) -> float:
    """Return by how many seconds comparing documents takes longer, all processes together, than in
    proportion to their number, in a corpus of `times` as many documents as the sample that
    `rehearsed` measured.

    Buckets grow with the corpus until they are full, each in its own time, and so does the number
    of documents that each offers. The number of compared texts is extrapolated from the two
    rehearsals as a power of the number of documents, up to MOST_COMPARED for each document.
    """
    from mlm_repro.data_pipeline.duplicates.near_duplicates import MOST_COMPARED

    (fewer, _, few, *_), (many, _, counted, *_) = rehearsed.took
    offers = OFFER_SECONDS * counted["offered"]
    pairs = counted["compared"]
    grown = offered(times * rehearsed.buckets) / max(1, offered(rehearsed.buckets))
    more = (offers + COMPARISON_SECONDS * counted["unlike"]) * (grown - times)
    power = math.log((1 + pairs) / (1 + few["compared"])) / math.log(max(2.0, many / fewer))
    most = min(times ** min(2.0, power) * pairs, MOST_COMPARED * times * counted["members"])
    each = (counted["seconds"] - offers) / max(1, pairs)
    return more + max(0.0, each * (most - times * pairs))


def offered(buckets: NDArray[Any]) -> float:
    """Return about how often buckets with these numbers of documents, [buckets], which may be
    fractions, offer a document for comparison, all buckets together. A bucket of n offers each
    member the earlier ones, up to MOST_OFFERED: about n²/2 offers, or MOST_OFFERED · (n −
    MOST_OFFERED/2) if n is larger than that."""
    from mlm_repro.data_pipeline.duplicates.near_duplicates import MOST_OFFERED

    full = np.minimum(buckets, MOST_OFFERED)
    return float((full * (buckets - full / 2)).sum())


def forecast(config: DataConfig) -> None:
    """Print to standard error, except with `--quiet`, the time, memory and disk of a build of
    `config` by stage, as if nothing was made yet, from a rehearsal on a sample; then the same for
    each larger corpus, of a size in LARGER. If no rehearsal is possible, print the reason in place
    of these. Raises the errors of `announce_cost`, such as BadInput for a source without files and
    DataMissing for a source that cannot be obtained."""
    sources, _ = announce_cost(config)
    try:
        rehearsed = rehearse(config, sources)
    except UserError as error:
        announce(f"no time: {error}")
        return
    tokens = config.tokenizer.vocab_size if config.tokenizer.is_trained else 0
    counted = f"training a tokenizer of {tokens:,} tokens counts as one of {REHEARSED_TOKENS}"
    untold = counted * (tokens > REHEARSED_TOKENS)
    for size in (sources.total_bytes, *(size for size in LARGER if size > sources.total_bytes)):
        told = promise(config, sources, rehearsed, size)
        of_stages = ", ".join(
            f"{name} {format_duration(told.seconds.get(name, 0))} and"
            f" {format_bytes(told.disk.get(name, 0))}"
            for name in dict.fromkeys([*told.seconds, *told.disk])
        )
        announce(
            f"{format_bytes(size)} in {told.documents:,} documents, by a rehearsal on the first "
            f"{format_bytes(rehearsed.bytes)}: about {format_duration(sum(told.seconds.values()))}",
            f"{format_bytes(told.memory)} of memory",
            f"{format_bytes(sum(told.disk.values()))} of disk",
            of_stages,
            untold,
        )


class Built(NamedTuple):
    """Measured cost of building a dataset of one sample of a corpus: the sample's number of
    documents; the processor seconds of each stage and, under `REST`, of other work; what the
    comparison of documents counted; the bytes on disk of each stage; and the bytes of the sample's
    slices, which are held in memory."""

    documents: int
    seconds: dict[str, float]
    """Dict from each stage to its processor seconds."""
    counted: dict[str, float]
    """Counts that the tasks which compare documents returned, summed over the tasks, by name."""
    disk: dict[str, int]
    """Dict from each stage to its bytes on disk while the sample is built."""
    gathered: int
    """Bytes of the sample's slices, which are held in memory."""


class Rehearsed(NamedTuple):
    """Measured cost of building a sample of a corpus, `documents` documents in a file of JSON lines
    of `bytes` bytes: two Built with times and counts, of a small build and of the sample's, the
    bytes on disk by stage, the peak memory, and the number of documents in each bucket of the
    search for near-duplicates. The cost of the whole corpus is predicted from it."""

    documents: int
    bytes: int
    took: list[Built]
    """Two measurements, of a small build and of the sample's build."""
    disk: dict[str, int]
    """Dict from each stage to its bytes on disk while the sample is built with a vocabulary as
    large as the recipe's."""
    memory: int
    """Peak bytes of the process that built the sample."""
    buckets: Integers
    """Number of documents in each bucket of the sample, in all bands."""


def rehearse(config: DataConfig, sources: OpenedSources) -> Rehearsed:
    """Build samples, the first text of the sources, in a temporary folder, and return the measured
    cost of the largest, of about REHEARSED_BYTES, as a Rehearsed. Each is built by one process, and
    compared with no other dataset. Nothing is printed. `sources` are the opened sources of
    `config`.

    Raises UserError if that cannot be done, such as BadInput for a source on the hub or
    `installed-docs`.
    """
    local = [source for source in sources.sources if isinstance(source, FileSource)]
    if len(local) < len(sources.sources):
        raise BadInput(
            "time, memory and disk are predicted by a rehearsal, which reads only files, and"
            " `sources.names` has a corpus of the Hugging Face hub or installed-docs: leave that"
            " out there to have the rest predicted"
        )
    values = config.model_dump(mode="json", exclude={"sources"}) | {"workers": 1}
    if "deduplicate" in config.stages:
        values["deduplicate"]["against"] = []
    if config.tokenizer.is_trained:
        values["tokenizer"]["vocab_size"] = min(REHEARSED_TOKENS, config.tokenizer.vocab_size)
    few = REHEARSED_BYTES >> 4
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
        # The first build also loads what every process loads once: modules, machine code and, where
        # a text may match, the n-grams of test sets, for which a small sample may give no reason.
        # The second gives the cost of small stages, and the third that of the documents.
        loaded, *took = (
            _build_sample(values, local, size, Path(name, str(number)))
            for number, size in enumerate((REHEARSED_BYTES, few, REHEARSED_BYTES))
        )
        from mlm_repro.data_pipeline.duplicates.lsh import buckets
        from mlm_repro.data_pipeline.passes.train_tokenizer import train

        start = sum(loaded.seconds.values()) - sum(took[1].seconds.values())
        for built in took:
            built.seconds[REST] += start
        work = Path(name, "2")
        sizes = [np.empty(0, np.int64)]
        for path in work.glob("fingerprints/*/band-*.bin"):
            sizes.append(np.diff(buckets(np.fromfile(path, np.uint64))[1]))
        rehearsed = Rehearsed(
            took[1].documents,
            work.with_suffix(".jsonl").stat().st_size,
            took,
            took[1].disk,
            getrusage(RUSAGE_SELF).ru_maxrss << 10,
            np.concatenate(sizes),
        )
        # Token ids take the disk that they take by a vocabulary of the recipe's size, or of the
        # largest half, quarter and so on that the sample gives.
        wanted = config.tokenizer.vocab_size
        asked = {
            "kind": config.tokenizer.kind,
            "shards": (0, len([*work.glob("prepare/*")])),
            "bytes": 0,
        }
        while config.tokenizer.is_trained and wanted > REHEARSED_TOKENS:
            with contextlib.suppress(BadInput):
                train({**asked, "vocab_size": wanted}, [work / "prepare"], Path(name))
                values["tokenizer"]["path"] = name
                of_size = _build_sample(values, local, REHEARSED_BYTES, Path(name, "3"))
                return rehearsed._replace(disk=of_size.disk)
            wanted //= 2
        return rehearsed


def _build_sample(values: JSON, local: list[FileSource], size: int, work: Path) -> Built:
    """Write the first documents of the sources `local` to the file `WORK.jsonl` beside `work`, at
    least two and at least `size` bytes of lines, or all documents if they are fewer. Build the
    dataset `WORK.dataset` of them by the recipe `values` without its sources, and return the
    measured cost as a Built. The other files of the tasks stay in the new folder `work`. Sets
    `sources` in `values`. Raises the errors of a build."""
    sample_file = work.with_suffix(".jsonl")
    with sample_file.open("wb") as file:
        documents = 0
        for item in chain.from_iterable(source.sample() for source in local):
            if isinstance(item, Document):
                file.write(json_line({"text": item.text}))
                documents += 1
            # A build needs two documents, one for each split.
            if documents > 1 and file.tell() >= size:
                break
    values["sources"] = {"names": [f"jsonl:{sample_file}"], "max_bad_fraction": 1.0}
    begun = time.process_time()
    clock = time.monotonic()
    from mlm_repro.data_pipeline.pipeline import Pipeline
    from mlm_repro.data_pipeline.publish import publish

    sample = parse_config(values, DataConfig, "the rehearsal")
    opened, test_sets, parents, _ = _open(sample, 0)
    work.mkdir()
    with LocalExecutor(1) as executor:
        pipeline = Pipeline(sample, opened, test_sets, Workspace(work, executor), parents).run()
        gathered = bytes_below(work / "gather")
        disk = Counter[str]()
        for path in filter(Path.is_file, work.rglob("*")):
            folder = path.relative_to(work).parts[0]
            # Slices count twice: they are joined into the files of the dataset.
            disk[STAGE_OF.get(path.name, STAGE_OF.get(folder, sample.stages[-1]))] += (
                path.stat().st_size * (2 if folder == "gather" else 1)
            )
        publish(pipeline, work.with_suffix(".dataset"))
    busy = time.process_time() - begun
    share = busy / (time.monotonic() - clock)
    seconds = {stage.name: share * stage.seconds for stage in pipeline.ledger.stages}
    seconds[REST] = busy - sum(seconds.values())
    counted = defaultdict[str, float](float)
    for path in chain(work.glob(f"link/*/{MARKER}"), work.glob(f"resolve/*/{MARKER}")):
        for what, count in read_json(path)["counts"].items():
            counted[what] += count
    counted["seconds"] *= share
    return Built(documents, seconds, counted, disk, gathered)


def _run_stages(
    config: DataConfig,
    begin: Callable[..., RunDirectory],
    executor: str,
    room: int,
    shelf: Path | None = None,
    meeting: Meeting | None = None,
) -> RunDirectory:
    """Open all input and print the cost to standard error, then run the stages of `config` in the
    RunDirectory that `begin` makes, and return it complete; one that is sealed already is returned
    at once. `begin` is given the dict about input, code and libraries that `_open` returns.
    `executor` is "local" or "ray". `room` is the disk space that the work takes, as a multiple of
    the input. `shelf` is a folder that keeps the results of slow stages for the next build. With a
    `meeting`, this process is one part of several. Raises the errors of `_open`, `begin`,
    `Meeting.agree`, `_complete` and the stages, and BadInput for "ray" if Ray is not installed."""
    workers = _workers(executor, config)
    sources, test_sets, parents, needed = _open(config, room)
    if meeting:
        meeting.agree(parents)

    def build(workspace: Workspace) -> Callable[[Path], dict[str, str]]:
        from mlm_repro.data_pipeline.pipeline import Pipeline
        from mlm_repro.data_pipeline.publish import publish

        return partial(publish, Pipeline(config, sources, test_sets, workspace, parents).run())

    return _complete(begin(parents), build, workers, needed, shelf, meeting)


def _made_by(config: DataConfig) -> dict[str, str]:
    """Return a dict name → text of the facts that decide the bytes of a dataset beside the settings
    and the input of the recipe `config`: facts of its stages, digests of the source code, also of
    the user's own stages, and versions of libraries."""
    stated = {}
    for name in config.stages:
        for key, value in BY_NAME[name].made_with().items():
            stated[f"{name}: {key}"] = str(value)
    return stated | made_by() | own_code(config.stages)


def _workers(executor: str, config: DataConfig) -> LocalExecutor | RayExecutor:
    """Return the executor called `executor`, "ray" or "local", with the number of workers of the
    recipe `config`; it runs no task yet. Local processes start with the tables of cleaning and
    languages if both stages run. Raises BadInput if Ray is wanted and not installed."""
    if executor == "ray":
        return RayExecutor(config.workers)
    # Making the tables takes time, which a build without these stages need not spend.
    return LocalExecutor(
        config.workers, TABLES if {"clean", "language"} <= {*config.stages} else ()
    )


def _open(
    config: DataConfig, room: int
) -> tuple[OpenedSources, dict[str, Path | None], dict[str, str], int]:
    """Open the sources and find the test sets of a recipe, and print to standard error the cost,
    and warnings of missing test sets and of a tokenizer that does not restore every text. `room` is
    the disk space that the work takes, as a multiple of the input.

    Returns four values: the opened sources, with the datasets of `deduplicate.against` to compare
    with; a dict from each test set's name to its file, None for a missing one; a dict name → digest
    or version of all input, code and libraries, "missing" for a missing test set; and the largest
    disk space in bytes. Raises BadInput for input that cannot be used, DataMissing for a source or
    a vocabulary that is not to be had, IntegrityFailure for `documents` that are not as they were
    sealed, and Interrupted if a server or the hub cannot be asked.
    """
    sources, needed = announce_cost(config, room)
    parents = _made_by(config)
    if "deduplicate" in config.stages:
        paths = config.deduplicate.against
        sources.compared = tuple(
            FileSource(f"documents:{path}", is_compared=True) for path in paths
        )
    wanted = config.decontaminate.test_sets if "decontaminate" in config.stages else ()
    test_sets = {name: _find_or_none(name) for name in wanted}
    path = config.tokenizer.path
    end_of_text = config.tokenizer.end_of_text
    if config.needs_tokenizer and path:
        tokenizer = Tokenizer.open(path, end_of_text)
        parents["tokenizer"] = tokenizer.digest
        if change := tokenizer.changes():
            print(
                f"warning: tokenizer {path} does not restore every text: {change}", file=sys.stderr
            )
    elif config.needs_tokenizer and config.tokenizer.kind == "gpt2":
        parents["tokenizer"] = Tokenizer.from_gpt2_files(*find_gpt2_vocabulary()).digest
    for name, test_set in test_sets.items():
        parents[f"test set {name}"] = sha256_file(test_set) if test_set else "missing"
    return sources, test_sets, sources.fingerprints() | parents, needed


def _complete(
    run: RunDirectory,
    build: Build,
    workers: LocalExecutor | RayExecutor,
    room: int,
    shelf: Path | None = None,
    meeting: Meeting | None = None,
) -> RunDirectory:
    """Complete `run`, a run that has begun, and return it. Lock its directory; call `build` with a
    Workspace there, whose tasks run on the executor `workers`; give the path of the directory to
    the function that `build` returns, which fills it and returns the digests of files that sealing
    need not read, or None; seal the run. A run that is sealed already is returned at once, with a
    note on standard error. `room` is the disk space in bytes that the work may take.

    `shelf` is a folder that keeps the results of slow stages from one build to the next. With a
    `meeting`, each part of the array of jobs except the first works in the directory without its
    lock, and ends when the run is sealed. Raises BadInput if another process has the lock or the
    disk lacks room, Interrupted for an OSError, and the errors of `build`.
    """
    work = run.path / FOLDER
    # A lock or work that a kill left beside a complete run is removed below, under the lock.
    if run.is_at_rest and not work.exists():
        return _found(run)
    executor = PartExecutor(workers, meeting, lambda: run.is_complete) if meeting else workers
    if meeting and meeting.part > 1:
        return _help(run, build, workers, executor, meeting, room)
    _tell_of_others(run)
    with run.filled():
        if run.is_complete:
            shutil.rmtree(work, ignore_errors=True)
            return _found(run)
        taken = None
        if shelf and not work.exists():
            with contextlib.suppress(FileNotFoundError):  # no earlier build of that name
                os.rename(shelf, work)
                taken = shelf
        try:
            with _workspace(run, workers, room) as workspace:
                workspace.executor = executor
                write = build(workspace)
                workspace.executor = workers  # the other parts only wait for the writing
                # The splits' digests are known from writing: the seal need not read them.
                run.complete(write(run.path))
                _put_away(work, shelf)
        except BadInput:
            # Work from an earlier build goes back to its shelf: a refused recipe must not cost it.
            if run.is_new:
                _put_away(work, taken)
            raise
    return run


def _tell_of_others(run: RunDirectory) -> None:
    """Print to standard error a note of each folder beside the run's that holds unfinished work on
    the same recipe with other code, libraries or input, which this run cannot use. Folders whose
    manifests cannot be read are left out."""
    manifest = run.manifest
    for work in sorted(run.path.parent.glob(f"{manifest['name']}-*/{FOLDER}")):
        with contextlib.suppress(UserError):
            other = RunDirectory.open(work.parent)
            begun = other.manifest
            parents = begun["parents"].items() - manifest["parents"].items()
            if parents and begun["settings"] == manifest["settings"] and not other.is_complete:
                print(
                    f"note: {work.parent} holds unfinished work on this recipe,"
                    f" {format_bytes(bytes_below(work))}, of no use here, as it was begun with"
                    f" another {', '.join(sorted(dict(parents)))}: remove that folder, or go on"
                    f" there by the same command under {Manifest(**begun).environment.code}",
                    file=sys.stderr,
                )


def _help(
    run: RunDirectory,
    build: Build,
    workers: LocalExecutor | RayExecutor,
    executor: Executor,
    meeting: Meeting,
    room: int,
) -> RunDirectory:
    """Do the work of one part, but not the first, of a build on several machines, and return the
    `run`. Wait in the `meeting` until the first part has begun; call `build` with a Workspace in
    the run's directory, whose `executor`, a PartExecutor on `workers`, does this part's share of
    each stage's tasks; then wait until the first part has sealed the run. What `build` returns is
    not used. `room` is the disk space in bytes that the work may take. A UserError, such as
    Interrupted for a part that has ended, is raised only if the run is not sealed."""
    work = run.path / FOLDER
    try:
        meeting.wait_for(
            lambda: work.exists() or run.is_complete or None, 1, lambda: "it did not begin"
        )
        if not run.is_complete:
            with _workspace(run, workers, room) as workspace:
                workspace.executor = executor
                build(workspace)
                meeting.wait_for(
                    lambda: run.is_complete or None, 1, lambda: "the dataset is being written"
                )
    except UserError:
        if not run.is_complete:
            raise
    return run


@contextlib.contextmanager
def _workspace(
    run: RunDirectory, workers: LocalExecutor | RayExecutor, room: int
) -> Iterator[Workspace]:
    """Context manager: make a run's hidden directory for tasks unless it is there, yield a
    Workspace there, whose tasks run on the executor `workers`, and end the worker processes after
    the block; the directory stays. Raises BadInput if the disk has less free space than the work
    needs, `room` bytes less the bytes that the directory already has; Interrupted for any OSError,
    of the block too, such as a full disk."""
    work = run.path / FOLDER
    try:
        work.mkdir(mode=0o700, exist_ok=True)
        free = shutil.disk_usage(run.path).free
        needed = room - bytes_below(work)
        if needed > free:
            raise BadInput(
                f"{run.path.parent} has {free / 1e9:,.1f} GB of free space, and the work may take"
                f" {needed / 1e9:,.1f} GB: make room, or name a folder on a larger disk as --runs"
                " or OUT"
            )
        with workers:
            yield Workspace(work.resolve(), workers)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise Interrupted(
                f"the disk of {run.path} takes no more ({error.strerror}): make room and run the"
                " same command again, which keeps what was finished; at another place it begins"
                " anew"
            ) from error
        raise Interrupted(
            f"a file could not be read or written while {run.path} was made: {error}; the same"
            " command continues from what was finished"
        ) from error


def _put_away(work: Path, shelf: Path | None) -> None:
    """Remove the directory `work` of a run that has ended; a missing one is no error. With a
    `shelf`, a path, first move the directory there, in place of an earlier directory, without the
    results of quick stages, for the next build of that name."""
    if shelf and work.is_dir():
        for path in work.iterdir():
            if not path.name.startswith(DEAR):
                shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(shelf, ignore_errors=True)
        shelf.parent.mkdir(exist_ok=True)
        os.replace(work, shelf)
    shutil.rmtree(work, ignore_errors=True)


def _found(run: RunDirectory) -> RunDirectory:
    """Print to standard error that `run`, a complete run, was found, let the symbolic link that has
    the run's name, beside the run's directory, point to the run, and return `run`. A file or folder
    that has the link's name stays. Raises BadInput if this user may not write there."""
    print(f"already complete: {run.path}", file=sys.stderr)
    run.link()
    return run


def _find_or_none(name: str) -> Path | None:
    """Return the absolute path of the test set `name`: of a published one by its name, such as
    `lambada`, which is downloaded if this machine does not have it, or the PATH of `jsonl:PATH` or
    `text:PATH`. If a published one is missing and cannot be downloaded, print a warning to standard
    error and return None. Raises BadInput if there is no file at PATH, and for a name that is not
    published and has no PATH."""
    try:
        return find_test_set(name).resolve()
    except DataMissing as error:
        print(f"warning: no decontamination against {name}: {error}", file=sys.stderr)
        return None
