"""What a dry run promises of disk and documents beside what a build takes, for texts of three shapes."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from mlm_repro.data_pipeline import publish, runner
from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.data_pipeline.files import LEDGER, Ledger
from mlm_repro.data_pipeline.reading.sources import open_sources
from mlm_repro.lineage.config import override_config
from mlm_repro.lineage.digest import bytes_below
from mlm_repro.lineage.files import read_document

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def words(rng: random.Random, count: int) -> str:
    return " ".join("".join(rng.choices(LETTERS, k=rng.randrange(2, 9))) for _ in range(count))


def tweet(rng: random.Random) -> str:
    return words(rng, rng.randrange(4, 30))


def book(rng: random.Random) -> str:
    return "\n\n".join(words(rng, 90).capitalize() + "." for _ in range(rng.randrange(100, 160)))


def code(rng: random.Random) -> str:
    lines = [f"{'    ' * rng.randrange(4)}{words(rng, 1)} = {words(rng, 1)}({words(rng, 1)})" for _ in range(60)]
    return "\n".join([*lines[: rng.randrange(5, 60)], "# " + words(rng, 12)])


@pytest.mark.parametrize("shape", [tweet, book, code])
def test_disk_is_promised_within_a_quarter(
    shape: Callable[[random.Random], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, path = random.Random(1), tmp_path / "corpus.jsonl"
    with path.open("w") as file:
        while file.tell() < 2_500_000:
            file.write(json.dumps({"url": "https://example.org/" + words(rng, 1), "text": shape(rng)}) + "\n")
    values = {
        "name": "shape", "workers": 1, "stages": ["clean", "length", "deduplicate", "split", "tokenize"],
        "sources": {"names": [f"jsonl:{path}"]}, "length": {"min_tokens": 1},
        "tokenizer": {"kind": "train", "vocab_size": 300},
    }  # fmt: skip
    config = override_config(DataConfig.model_validate(values), [])
    monkeypatch.setattr(runner, "REHEARSED_BYTES", 1 << 20)
    sources = open_sources(config.sources, 1)
    rehearsed = runner._rehearse(config, sources)
    taken: list[int] = []
    move = publish._move

    def weigh(source: Path, target: Path) -> None:
        if not taken:
            taken.append(bytes_below(next(iter(tmp_path.glob("runs/*/.work")))))
        move(source, target)

    monkeypatch.setattr(publish, "_move", weigh)
    run = runner.build_dataset(config, tmp_path / "runs")
    ledger = read_document(run.path / LEDGER, Ledger)
    times = sources.documents / rehearsed.documents
    promised = times * sum(rehearsed.disk.values())
    seconds = times * sum(rehearsed.seconds.values()), sum(stage.seconds for stage in ledger.stages)
    print(f"{shape.__name__}: disk {promised / 1e6:.1f} of {taken[0] / 1e6:.1f} MB, seconds {seconds}")
    assert sources.documents == pytest.approx(ledger.stages[0].documents_in, rel=0.1)
    assert promised == pytest.approx(taken[0], rel=0.25)
    assert taken[0] < runner.announce_cost(config)[1]
