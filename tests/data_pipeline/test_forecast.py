"""What a dry run promises of disk and time beside what a build takes, for texts of four shapes."""

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.corpora import texts, words, write_corpus, write_recipe
from mlm_repro.data_pipeline import pipeline, publish, runner
from mlm_repro.data_pipeline.config import DataConfig, DeduplicateConfig, SourcesConfig
from mlm_repro.data_pipeline.contamination.decontaminate import ngrams_of_files
from mlm_repro.data_pipeline.contamination.words import Ngrams
from mlm_repro.data_pipeline.document import Document
from mlm_repro.data_pipeline.duplicates import near_duplicates
from mlm_repro.data_pipeline.duplicates.lsh import buckets, fingerprints
from mlm_repro.data_pipeline.files import LEDGER, Ledger
from mlm_repro.data_pipeline.passes import deduplicate, measure, prepare
from mlm_repro.data_pipeline.pipeline import Pipeline
from mlm_repro.data_pipeline.reading.installed_docs import InstalledDocs, extract
from mlm_repro.data_pipeline.reading.sources import open_sources
from mlm_repro.lineage.config import override_config
from mlm_repro.lineage.digest import bytes_below
from mlm_repro.lineage.files import read_document
from tests.data_pipeline.conftest import write_jsonl


def weighed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that has, once a dataset in `folder / "runs"` is built, the bytes of its work before
    the first file of the dataset was moved out of it."""
    taken: list[int] = []
    move = publish._move

    def weigh(source: Path, target: Path) -> None:
        if not taken:
            taken.append(bytes_below(next(iter(folder.glob("runs/*/.work")))))
        move(source, target)

    monkeypatch.setattr(publish, "_move", weigh)
    return taken


@pytest.mark.parametrize("shape", ["tweets", "books", "code", "templates"])
def test_disk_is_promised_within_a_quarter_and_time_within_a_tenth(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on where a stage looks at it, before and after each document.

    Processor seconds differ where others use the machine; `benchmarks data --case` measures them on
    a quiet one."""
    ticks = count()

    def tick() -> float:
        return next(ticks) / 1000

    clock = SimpleNamespace(process_time=tick, monotonic=tick, perf_counter=tick)
    for module in (runner, deduplicate, measure):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(prepare, "perf_counter", tick)
    monkeypatch.setattr(pipeline, "monotonic", tick)
    invented, path = texts(shape, 10**6), tmp_path / "corpus.jsonl"
    with path.open("w") as file:
        while file.tell() < 2_500_000:
            file.write(
                json.dumps({"url": f"https://example.org/{file.tell()}", "text": next(invented)})
                + "\n"
            )
    values = {
        "name": "shape",
        "workers": 1,
        "stages": ["clean", "length", "deduplicate", "split", "tokenize"],
        "sources": {"names": [f"jsonl:{path}"]},
        "length": {"min_tokens": 1},
        "tokenizer": {"kind": "train", "vocab_size": 300},
    }
    config = override_config(DataConfig.model_validate(values), [])
    sources = open_sources(config.sources, 1)
    # This process is one that has begun, for the rehearsal and for the build.
    monkeypatch.setattr(runner, "REHEARSED_BYTES", 1 << 14)
    runner.rehearse(config, sources)
    monkeypatch.setattr(runner, "REHEARSED_BYTES", 1 << 20)
    rehearsed = runner.rehearse(config, sources)
    taken = weighed(tmp_path, monkeypatch)
    busy = tick()
    run = runner.build_dataset(config, tmp_path / "runs")
    busy = tick() - busy
    ledger = read_document(run.path / LEDGER, Ledger)
    told = runner.promise(config, sources, rehearsed, sources.total_bytes)
    promised = sum(told.disk.values())
    print(
        f"{shape}: disk {promised / 1e6:.1f} and {taken[0] / 1e6:.1f} MB, s"
        f" {sum(told.seconds.values())} and {busy}"
    )
    tenfold = runner.promise(config, sources, rehearsed, 10 * sources.total_bytes)
    assert tenfold.documents == 10 * told.documents
    assert sum(tenfold.disk.values()) == pytest.approx(10 * promised)
    large, larger = (
        runner.promise(config, sources, rehearsed, times * sources.total_bytes)
        for times in (200, 400)
    )
    assert larger.memory - large.memory == runner.DOCUMENT_BYTES * (
        larger.documents - large.documents
    )
    assert told.memory <= tenfold.memory <= large.memory
    assert all(told.seconds[name] <= tenfold.seconds[name] for name in told.seconds)
    assert sources.documents == pytest.approx(ledger.stages[0].documents_in, rel=0.1)
    assert promised == pytest.approx(taken[0], rel=0.25)
    assert sum(told.seconds.values()) == pytest.approx(busy, rel=0.1)
    assert told.seconds[runner.REST] > 0
    assert taken[0] < runner.announce_cost(config)[1]


def real_texts(kind: str) -> Iterator[str]:
    """English of the installed documentation, whole or sentence by sentence, or Python code of the
    standard library; no text is longer than 20,000 characters."""
    for place in InstalledDocs(SourcesConfig(names=("installed-docs",)), 0).places:
        if kind == "code":
            if place[0] == "python" and place[1].endswith(".py"):
                yield place[2].read_text(encoding="utf-8", errors="replace")[:20_000]
            continue
        for document in extract(place):
            text = document.text[:20_000] if isinstance(document, Document) else ""
            yield from re.findall(r"[^.!?]{30,139}[.!?]", text) if kind == "tweets" else [text]


@pytest.mark.parametrize("kind", ["english", "code", "tweets"])
def test_disk_of_a_trained_vocabulary_is_promised_within_a_quarter(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of real text, in which a vocabulary of thousands has longer tokens than one of 300."""
    path = tmp_path / "corpus.jsonl"
    with path.open("w") as file:
        for text in real_texts(kind):
            file.write(json.dumps({"text": text}) + "\n")
            if file.tell() > 3_000_000:
                break
    assert path.stat().st_size > 3_000_000
    values = {
        "name": "shape",
        "workers": 1,
        "stages": ["deduplicate", "split", "tokenize"],
        "sources": {"names": [f"jsonl:{path}"]},
        "tokenizer": {"kind": "train", "vocab_size": 8000},
    }
    config = override_config(DataConfig.model_validate(values), [])
    sources = open_sources(config.sources, 1)
    monkeypatch.setattr(runner, "REHEARSED_BYTES", 1 << 20)
    sizes = []
    run = Pipeline.run

    def counted(pipeline: Pipeline) -> Pipeline:
        sizes.append(pipeline.sources.total_bytes)
        return run(pipeline)

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "run", counted)
        rehearsed = runner.rehearse(config, sources)
    # Twice, as the first one loads modules; and once with a vocabulary of the recipe's size.
    assert [round(size / 2**16) for size in sizes] == [16, 1, 16, 16]
    promised = sum(runner.promise(config, sources, rehearsed, path.stat().st_size).disk.values())
    taken = weighed(tmp_path, monkeypatch)
    runner.build_dataset(config, tmp_path / "runs")
    print(f"{kind}: disk {promised / 1e6:.2f} and {taken[0] / 1e6:.2f} MB")
    assert promised == pytest.approx(taken[0], rel=0.25)


def test_buckets_of_a_sample_foretell_what_those_of_a_corpus_offer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages of templates, eightfold: rare buckets are still growing where common ones are full."""
    monkeypatch.setattr(near_duplicates, "MOST_OFFERED", 40)
    monkeypatch.setattr(near_duplicates, "MOST_COMPARED", 1)
    config, pages = DeduplicateConfig(), [*texts("templates", 2400)]
    bands = config.banding[0]
    rows = fingerprints(pages, config)
    sketches = np.ascontiguousarray(rows[:, bands:])

    def offers(count: int) -> tuple[int, np.ndarray]:
        keys = [rows[:count, band].copy() for band in range(bands)]
        every, bounds = np.arange(count), np.array([0, count])
        linked = near_duplicates.Linked(
            every, bounds, keys.__getitem__, sketches, pages.__getitem__
        )
        found = near_duplicates.resolve(linked, config)
        return found.offered, np.concatenate([np.diff(buckets(each)[1]) for each in keys])

    few, sizes = offers(300)
    many, _ = offers(2400)
    foretold = few * runner.offered(8 * sizes) / runner.offered(sizes)
    print(f"{few:,} offered in the sample, {many:,} in the corpus, {foretold:,.0f} foretold")
    assert many < 0.6 * 64 * few
    assert foretold == pytest.approx(many, rel=0.1)


TWICE = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from mlm_repro.data_pipeline import runner
from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.data_pipeline.reading.sources import open_sources
from mlm_repro.lineage.config import load_config
config = load_config(Path(sys.argv[1]), DataConfig, [])
sources = open_sources(config.sources, 1)
modules = lambda: float(len(sys.modules))
runner.time = SimpleNamespace(process_time=modules, monotonic=time.monotonic)
for _ in range(2):
    before = modules()
    rehearsed = runner.rehearse(config, sources)
    loaded = modules() - before
    promised = runner.promise(config, sources, rehearsed, sources.total_bytes)
    print(sum(promised.seconds.values()), loaded)
"""


def test_the_start_of_a_process_is_in_its_promise(tmp_path: Path) -> None:
    """Modules that a build loads, each a second of this test's clock: in a fresh process, and not
    once more."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", "tweets", 200)
    done = subprocess.run(
        [sys.executable, "-c", TWICE, str(write_recipe(tmp_path, corpus))],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    fresh, loaded, begun, loaded_again = map(float, done.stdout.split())
    print(f"{fresh} of {loaded} in a fresh process, {begun} in one that has begun")
    assert loaded > 20
    assert loaded_again == 0
    assert fresh == pytest.approx(loaded, rel=0.1)
    assert begun < 1


def test_a_first_document_that_fills_the_sample_is_not_alone(tmp_path: Path) -> None:
    """A dataset needs two documents, and so does a rehearsal of it."""
    path = tmp_path / "corpus.jsonl"
    lengths = [runner.REHEARSED_BYTES >> 6, *[400] * 20]
    path.write_text(
        "".join(json.dumps({"text": words(random.Random(0), length)}) + "\n" for length in lengths)
    )
    assert path.read_text().index("\n") > runner.REHEARSED_BYTES >> 4
    values = {
        "name": "large-first",
        "stages": ["split", "tokenize"],
        "sources": {"names": [f"jsonl:{path}"]},
        "tokenizer": {"kind": "train", "vocab_size": 300},
    }
    config = override_config(DataConfig.model_validate(values), [])
    rehearsed = runner.rehearse(config, open_sources(config.sources, 1))
    assert rehearsed.documents == len(lengths)


def test_what_a_process_loads_once_is_not_multiplied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-grams of a test set, which are only listed where a text may have one of them."""
    rng = random.Random(1)
    passages = [words(rng, 40) for _ in range(6000)]
    write_jsonl(tmp_path / "t.jsonl", passages)
    pages = [words(rng, 200) for _ in range(200)]
    pages[150] += f" {passages[7]}"
    path = write_jsonl(tmp_path / "corpus.jsonl", pages)
    ngrams_of_files.cache_clear()
    values = {
        "name": "exam",
        "stages": ["decontaminate", "split", "tokenize"],
        "sources": {"names": [f"jsonl:{path}"]},
        "decontaminate": {"test_sets": [f"jsonl:{tmp_path / 't.jsonl'}"]},
        "tokenizer": {"kind": "train", "vocab_size": 300},
    }
    config = override_config(DataConfig.model_validate(values), [])
    monkeypatch.setattr(runner, "REHEARSED_BYTES", path.stat().st_size)
    listing = Ngrams.__dict__["ngrams"]
    list_ngrams, build_sample = listing.func, runner._build_sample
    sizes: list[int] = []
    listed: list[int] = []

    def measured(ngrams: Ngrams) -> frozenset[str]:
        found: frozenset[str] = list_ngrams(ngrams)
        sizes.append(len(found))
        return found

    def counted(*given: Any) -> runner.Built:
        built = build_sample(*given)
        listed.append(sum(size > 160_000 for size in sizes))
        return built

    monkeypatch.setattr(listing, "func", measured)
    monkeypatch.setattr(runner, "_build_sample", counted)
    rehearsed = runner.rehearse(config, open_sources(config.sources, 1))
    few, many = rehearsed.took
    assert few.documents < 100 < 150 < many.documents
    assert listed == [1, 1, 1], "by the first sample, which no time of documents is taken from"


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        (
            {"kind": "train", "vocab_size": 8000},
            "; training a tokenizer of 8,000 tokens counts as one of 300",
        ),
        (
            {"kind": "words", "vocab_size": 2000},
            "; training a tokenizer of 2,000 tokens counts as one of 300",
        ),
        ({"kind": "train", "vocab_size": 300}, ""),
    ],
)
def test_a_forecast_says_what_it_leaves_out(
    tokenizer: dict[str, object],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The time of training a large vocabulary, of which a sample tells too little."""
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in islice(real_texts("english"), 90))
    )
    values = {
        "name": "shape",
        "stages": ["split", "tokenize"],
        "sources": {"names": [f"jsonl:{path}"]},
        "tokenizer": tokenizer,
    }
    monkeypatch.setattr(runner, "REHEARSED_BYTES", 1 << 17)
    runner.forecast(override_config(DataConfig.model_validate(values), []))
    told = [line for line in capsys.readouterr().err.splitlines() if "by a rehearsal" in line]
    assert len(told) == 4
    for line in told:
        assert line.endswith(said)
        assert ("training a tokenizer" in line) == bool(said)
