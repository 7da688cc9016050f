"""A valid file of every kind that is read from outside, and how it is read."""

import gzip
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pyarrow
import torch
import zstandard
from pyarrow import parquet
from safetensors.torch import save_file

from data_pipeline.config import DataConfig
from data_pipeline.reading.file_sources import FileSource
from data_pipeline.reading.readers import Limits, read_pieces
from data_pipeline.tokens.token_file import TokenFile, TokenFileWriter, token_dtype
from data_pipeline.work.workspace import Workspace
from engine.checkpoint.checkpoint import read_json
from engine.checkpoint.shards import check_entries, read_whole
from engine.config import RunConfig
from engine.formats.huggingface import BUFFER, read_weights
from engine.run.directory import read_begun_run, read_summary
from engine.run.loggers import open_loggers
from engine.run.metrics import MetricsLog
from experiments.catalogue import CLAIMS, load_claims
from lineage.config import load_config
from lineage.data_files import Ledger
from lineage.digest import MARKER, check_seal, seal
from lineage.errors import DataMissing
from lineage.files import Validation, read_document
from lineage.records import Record, read_records, write_records
from lineage.run import RunDirectory
from tests.architecture.rooms import ROOT

TEXTS = ("a fine text", "", "zwei Töchter \u2028", 'with "quotes" and \\ and \x00')
LINES = "\n".join(json.dumps({"text": text, "id": number}) for number, text in enumerate(TEXTS)).encode() + b"\n\n"
SHAPES = {"words": (4, 3), "bias": (3,)}


class Reader(NamedTuple):
    """What reads a kind of file."""

    name: str
    prepare: Callable[[Path], Path]
    """Makes a folder with a valid file in it and returns that file."""
    read: Callable[[Path], object]
    """Reads the file; raises one of `lineage.errors` if it cannot be used."""


def bytes_at(name: str, content: bytes) -> Callable[[Path], Path]:
    def prepare(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return prepare


def table(folder: Path) -> Path:
    parquet.write_table(pyarrow.table({"text": list(TEXTS)}), folder / "a.parquet", row_group_size=3)
    return folder / "a.parquet"


def documents(kind: str) -> Callable[[Path], object]:
    def read(path: Path) -> object:
        pieces = FileSource(f"{kind}:{path}").pieces(Workspace(path.parent, None), 1 << 16)  # type: ignore[arg-type]
        return list(read_pieces(pieces, Limits(max_line_bytes=1 << 15)))

    return read


def token_index(folder: Path) -> Path:
    with TokenFileWriter(folder / "a", token_dtype(300)) as writer:
        writer.add_documents([1, 2, 3, 4, 5, 6], [3, 0, 2, 1])
    return folder / "a.idx"


def read_tokens(path: Path) -> object:
    file = TokenFile(path.with_suffix(""))
    return [file[number].sum() for number in range(len(file))], file.document_index.sum()


def weights(folder: Path) -> Path:
    save_file({name: torch.ones(shape) for name, shape in SHAPES.items()}, folder / "model.safetensors")
    return folder / "model.safetensors"


def weight_index(folder: Path) -> Path:
    weights(folder).rename(folder / "part.safetensors")
    places = {"weight_map": dict.fromkeys(SHAPES, "part.safetensors")}
    return bytes_at("model.safetensors.index.json", json.dumps(places).encode())(folder)


def tensor_index(folder: Path) -> Path:
    weights(folder)
    index = {name: {"shape": shape, "dim": None, "files": ["model.safetensors"]} for name, shape in SHAPES.items()}
    return bytes_at("index.json", json.dumps(index).encode())(folder)


def read_tensors(path: Path) -> object:
    index = read_json(path)
    check_entries(path.parent, index, SHAPES)
    return [read_whole(path.parent, index, name) for name in SHAPES]


def claims(folder: Path) -> Path:
    lines = (CLAIMS / "transformer-xl-2019.csv").read_bytes().splitlines(keepends=True)
    return bytes_at("a.csv", b"".join(lines[:5]))(folder)


def records(folder: Path) -> Path:
    one = Record(experiment="a", series="b", quantity="c", value=1.5, kind="measured", source="d", x=3, digest="e")
    write_records(folder / "records.jsonl", [one, one.model_copy(update={"kind": "simulated", "low": 1, "high": 2})])
    return folder / "records.jsonl"


def manifest(folder: Path) -> Path:
    config = load_config(ROOT / "experiments" / "models" / "355m.toml", RunConfig).model_dump(mode="json")
    config["data"]["dataset"] = str(folder / "dataset")
    run = RunDirectory.begin(folder, "a", "training", config, {"dataset": "b"})
    return run.path / "manifest.json"


def read_manifest(path: Path) -> None:
    with suppress(DataMissing):
        read_begun_run(RunDirectory.open(path.parent))


def sealed(folder: Path) -> Path:
    (folder / "a").write_bytes(b"a")
    seal(folder)
    return folder / MARKER


METRICS = b"".join(
    json.dumps({"kind": kind, "iteration": number, "loss": 7.0 - number, "seconds": 0.5}).encode() + b"\n"
    for number in range(3)
    for kind in ("train", "validation")
)


def go_on_with(path: Path) -> None:
    with MetricsLog(path.parent, 2, {}, open_loggers(["tensorboard"]), print) as log:
        log.write(Validation(kind="validation", iteration=3, samples=1, loss=1.0, perplexity=2.7))
    shutil.rmtree(path.parent / "tensorboard")


SUMMARY = (
    b'{"parameters": 3, "iterations": 2, "tokens": 9, "layout": {"tp": 1}, "train_seconds": 1, "tokens_per_second": 9}'
)
LEDGER = json.dumps(
    {"stages": [{"name": "clean", "documents_in": 3, "documents_out": 2, "dropped": {"empty": {"documents": 1}},
                 "samples": {"empty": [{"id": "a:1", "excerpt": "b"}]}}], "splits": {"train": {"documents": 2}}}
).encode()  # fmt: skip

READERS = (
    Reader("jsonl", bytes_at("a.jsonl", LINES), documents("jsonl")),
    Reader("jsonl.gz", bytes_at("a.jsonl.gz", gzip.compress(LINES, mtime=0)), documents("jsonl")),
    Reader("jsonl.zst", bytes_at("a.jsonl.zst", zstandard.compress(LINES)), documents("jsonl")),
    Reader("parquet", table, documents("parquet")),
    Reader("text", bytes_at("a.txt", "\n".join(TEXTS).encode()), documents("text")),
    Reader("token index", token_index, read_tokens),
    Reader("safetensors", weights, lambda path: read_weights(path.parent, "", BUFFER)),
    Reader("safetensors index", weight_index, lambda path: read_weights(path.parent, "", BUFFER)),
    Reader("checkpoint index", tensor_index, read_tensors),
    Reader("model configuration", bytes_at("a.toml", (ROOT / "experiments/models/355m.toml").read_bytes()),
           lambda path: load_config(path, RunConfig)),
    Reader("data recipe", bytes_at("a.toml", (ROOT / "data_pipeline/recipes/megatron-2019.toml").read_bytes()),
           lambda path: load_config(path, DataConfig)),
    Reader("claims", claims, lambda path: load_claims(path.parent)),
    Reader("records", records, read_records),
    Reader("manifest", manifest, read_manifest),
    Reader("seal", sealed, lambda path: check_seal(path.parent)),
    Reader("metrics", bytes_at("metrics.jsonl", METRICS), go_on_with),
    Reader("summary", bytes_at("summary.json", SUMMARY),
           lambda path: read_summary(path.parent)),
    Reader("ledger", bytes_at("ledger.json", LEDGER), lambda path: read_document(path, Ledger)),
)  # fmt: skip
