"""What a slice of a split opens and reads: its own documents, and nothing that grows with the
corpus."""

import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from mlm_repro.data_pipeline.passes import gather
from mlm_repro.data_pipeline.passes.gather import SLICE_LINES, choose_order, gather_slice
from mlm_repro.data_pipeline.passes.selection import select_documents
from mlm_repro.data_pipeline.work.executors.local import LocalExecutor
from mlm_repro.data_pipeline.work.workspace import Workspace
from tests.data_pipeline.shards import measured_shards

OF_SHARD, OF_SLICE = 8, 6


def cost_of_a_slice(
    folder: Path, shards: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int, int]:
    """Files opened in shards, bytes read there, and bytes written, for the first slice of a
    shuffled corpus."""
    texts = [f"text {number} " * (1 + number % 5) for number in range(shards * OF_SHARD)]
    with LocalExecutor(1) as executor:
        workspace = Workspace(folder, executor)
        prepared, measured = measured_shards(workspace, texts, OF_SHARD, None)
        fixed = {
            "deduplicate": False,
            "decontaminate": None,
            "tokenizer": None,
            "is_written": True,
            "count": OF_SHARD,
        }
        selected = workspace.all(
            "select",
            select_documents,
            [
                ({**fixed, "start": n * OF_SHARD}, (prepared.task(n), measured.task(n)))
                for n in range(shards)
            ],
        )
        shuffle = {"train": 29, "valid": 1, "seed": 1}
        order = {"counts": [OF_SHARD] * shards, "splits": ["train"] * shards, "shuffle": shuffle}
        ordered = workspace.one("order", choose_order, order)
    opened, read = [0], [0]
    whole, pread = Path.open, os.pread

    def count_open(path: Path, *arguments: Any, **options: Any) -> Any:
        opened[0] += path.parent.parent in (prepared.path, measured.path, selected.path)
        return whole(path, *arguments, **options)

    def count_read(file: int, size: int, start: int) -> bytes:
        read[0] += size
        return pread(file, size, start)

    out = folder / "slice"
    out.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", count_open)
        patch.setattr(gather.os, "pread", count_read)
        inputs = [ordered.path, prepared.path, measured.path, selected.path]
        settings = {"split": "train", "first": 0, "last": OF_SLICE, "lines": True, "dtype": None}
        assert gather_slice(settings, inputs, out)["documents"] == OF_SLICE
    lines = (out / SLICE_LINES).read_bytes()
    assert all(orjson.loads(line)["text"] in texts for line in lines.splitlines())
    return opened[0], read[0], len(lines)


def test_a_slice_opens_and_reads_its_own_documents_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shards in (2, 10, 60):
        opened, read, written = cost_of_a_slice(tmp_path / str(shards), shards, monkeypatch)
        assert 0 < opened <= 2 * min(shards, OF_SLICE)
        assert read == written + OF_SLICE * gather.PLACE_BYTES


@pytest.mark.parametrize(("length", "documents", "times"), [(3, 12_000, 1), (3000, 1_200, 4)])
def test_a_slice_takes_its_room_however_short_its_documents_are(
    length: int, documents: int, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short ones take many times their text, so that a slice of as much text would take several
    times its room.

    Long ones take their text, and here two bytes for a token of each character.
    """
    monkeypatch.setattr(gather, "SLICE_BYTES", 3 << 20)
    monkeypatch.setattr(gather, "SLICE_DOCUMENTS", 3 << 10)
    texts = [f"{number % 1000:0{length}d}" for number in range(documents)]
    with LocalExecutor(1) as executor:
        workspace = Workspace(tmp_path, executor)
        prepared, measured = measured_shards(workspace, texts, documents, None)
        fixed = {"deduplicate": False, "decontaminate": None, "tokenizer": None, "is_written": True}
        settings = {**fixed, "start": 0, "count": documents}
        selected = workspace.one(
            "select", select_documents, settings, prepared.task(0), measured.task(0)
        )
        order = {"counts": [documents], "splits": ["train"], "shuffle": None}
        ordered = workspace.one("order", choose_order, order)
    np.zeros(documents * length, np.uint16).tofile(measured.path / "00000/tokens.bin")
    places = np.fromfile(selected.path / "00000/places.bin", np.int64).reshape(-1, 6)
    places[:, 3:5] = places[:, 5:].cumsum(axis=0) - [length, 0]
    places.tofile(selected.path / "00000/places.bin")
    inputs = [ordered.path, prepared.path, measured.path, selected.path]
    count = gather.slice_documents(documents, documents * length)
    cut = {"split": "train", "first": 0, "last": count, "lines": True, "dtype": "uint16"}
    (tmp_path / "slice").mkdir()
    tracemalloc.start()
    made = gather_slice(cut, inputs, tmp_path / "slice")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{count:,} documents of {length} characters: {peak / 1e6:.1f} MB")
    assert made == {"documents": count, "bytes": count * length, "tokens": count * length}
    assert gather.SLICE_BYTES / 8 < peak < times * gather.SLICE_BYTES
