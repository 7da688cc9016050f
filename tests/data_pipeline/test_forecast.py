"""What a dry run promises of disk and time beside what a build takes, for texts of four shapes."""

import json
import random
import time
from pathlib import Path

import pytest

from benchmarks.corpora import texts, words
from mlm_repro.data_pipeline import publish, runner
from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.data_pipeline.files import LEDGER, Ledger
from mlm_repro.data_pipeline.reading.sources import open_sources
from mlm_repro.lineage.config import override_config
from mlm_repro.lineage.digest import bytes_below
from mlm_repro.lineage.files import read_document


@pytest.mark.parametrize("shape", ["tweets", "books", "code", "templates"])
def test_disk_and_time_are_promised_within_a_quarter(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is the time of the processor; what else the machine does is not in it."""
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
    monkeypatch.setattr(runner, "REHEARSED_BYTES", 1 << 20)
    sources = open_sources(config.sources, 1)
    rehearsed = runner.rehearse(config, sources)
    taken: list[int] = []
    move = publish._move

    def weigh(source: Path, target: Path) -> None:
        if not taken:
            taken.append(bytes_below(next(iter(tmp_path.glob("runs/*/.work")))))
        move(source, target)

    monkeypatch.setattr(publish, "_move", weigh)
    busy = time.process_time()
    run = runner.build_dataset(config, tmp_path / "runs")
    busy = time.process_time() - busy
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
    assert sum(told.seconds.values()) == pytest.approx(busy, rel=0.25)
    assert told.seconds[runner.REST] > 0
    assert taken[0] < runner.announce_cost(config)[1]


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
