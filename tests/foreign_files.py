"""A valid file of every kind that is read from outside, and how it is read."""

import argparse
import gzip
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow
import torch
import zstandard
from pyarrow import parquet
from safetensors.torch import save_file

from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.data_pipeline.files import Ledger
from mlm_repro.data_pipeline.reading.file_sources import FileSource
from mlm_repro.data_pipeline.reading.readers import read_pieces
from mlm_repro.data_pipeline.tokens.token_file import TokenFile, TokenFileWriter, token_dtype
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.data_pipeline.work.workspace import Workspace
from mlm_repro.engine.checkpoint.checkpoint import _read_state, read_probe
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.data.dataset import DatasetFacts
from mlm_repro.engine.formats.huggingface import FORMATS, read_weights
from mlm_repro.engine.formats.torch_files import read_torch_file
from mlm_repro.engine.inference import check_entries, load_for_inference, read_whole
from mlm_repro.engine.run.files import Validation, read_summary
from mlm_repro.engine.run.loggers import open_loggers, writing_metrics
from mlm_repro.engine.run.resolved import PLACES, resolve_begun
from mlm_repro.experiments.catalogue import CLAIMS, find_experiment, load_claims
from mlm_repro.experiments.files import NOT_RUN
from mlm_repro.experiments.launch.job import Job
from mlm_repro.experiments.simulator.cluster import load_cluster
from mlm_repro.lineage.config import load_config
from mlm_repro.lineage.digest import MARKER, check_seal, seal
from mlm_repro.lineage.errors import DataMissing, IntegrityFailure
from mlm_repro.lineage.files import read_document, read_object
from mlm_repro.lineage.records import Record, read_records, write_records
from mlm_repro.lineage.run import RunDirectory
from mlm_repro.reports.report import Inputs, assemble
from mlm_repro.verify.recomputed import RunCheck
from tests import foreign_models, foreign_results
from tests.architecture.rooms import ROOT
from tests.damage import GZIP, PARQUET, SAFETENSORS, TORCH, ZSTANDARD
from tests.experiments.packed import DATASET, REPRODUCTION, TRAINING, packed
from tests.experiments.simulated import seal_simulated
from tests.reader import Reader, bytes_at

BUFFERS = FORMATS["gpt2"].buffers

TEXTS = ("a fine text", "", "zwei Töchter \u2028", 'with "quotes" and \\ and \x00')
LINES = (
    "\n".join(
        json.dumps({"text": text, "id": number}) for number, text in enumerate(TEXTS)
    ).encode()
    + b"\n\n"
)
SHAPES = {"words": (4, 3), "bias": (3,)}


def table(folder: Path) -> Path:
    parquet.write_table(
        pyarrow.table({"text": list(TEXTS)}), folder / "a.parquet", row_group_size=3
    )
    return folder / "a.parquet"


def documents(kind: str) -> Callable[[Path], object]:
    def read(path: Path) -> object:
        pieces = FileSource(f"{kind}:{path}").pieces(Workspace(path.parent, None), 1 << 16)  # type: ignore[arg-type]
        return list(read_pieces(pieces, 1 << 15))

    return read


def token_index(folder: Path) -> Path:
    with TokenFileWriter(folder / "a", token_dtype(300)) as writer:
        writer.add_documents([1, 2, 3, 4, 5, 6], [3, 0, 2, 1])
    return folder / "a.idx"


def read_tokens(path: Path) -> object:
    file = TokenFile(path.with_suffix(""))
    return [file[number].sum() for number in range(len(file))], file.document_index.sum()


def weights(folder: Path) -> Path:
    save_file(
        {name: torch.ones(shape) for name, shape in SHAPES.items()}, folder / "model.safetensors"
    )
    return folder / "model.safetensors"


def weight_index(folder: Path) -> Path:
    weights(folder).rename(folder / "part.safetensors")
    places = {"weight_map": dict.fromkeys(SHAPES, "part.safetensors")}
    return bytes_at("model.safetensors.index.json", json.dumps(places).encode())(folder)


def tensor_index(folder: Path) -> Path:
    weights(folder)
    index = {
        name: {"shape": shape, "dim": None, "files": ["model.safetensors"]}
        for name, shape in SHAPES.items()
    }
    return bytes_at("index.json", json.dumps(index).encode())(folder)


def read_tensors(path: Path) -> object:
    index = read_object(path)
    check_entries(path.parent, index, SHAPES)
    return [read_whole(path.parent, index, name) for name in SHAPES]


def claims(folder: Path) -> Path:
    lines = (CLAIMS / "transformer-xl-2019.csv").read_bytes().splitlines(keepends=True)
    return bytes_at("a.csv", b"".join(lines[:5]))(folder)


def records(folder: Path) -> Path:
    one = Record(
        experiment="a",
        series="b",
        quantity="c",
        value=1.5,
        kind="measured",
        source="d",
        x=3,
        digest="e",
    )
    write_records(
        folder / "records.jsonl",
        [one, one.model_copy(update={"kind": "simulated", "low": 1, "high": 2})],
    )
    return folder / "records.jsonl"


def manifest(folder: Path) -> Path:
    config = load_config(ROOT / "experiments" / "models" / "355m.toml", RunConfig).model_dump(
        mode="json"
    )
    config["data"]["dataset"] = str(folder / "dataset")
    run = RunDirectory.begin(folder, "a", "training", config, {"dataset": "b"}, PLACES)
    return run.path / "manifest.json"


def read_manifest(path: Path) -> None:
    with suppress(DataMissing):
        resolve_begun(RunDirectory.open(path.parent))


def sealed(folder: Path) -> Path:
    (folder / "a").write_bytes(b"a")
    seal(folder)
    return folder / MARKER


METRICS = b"".join(
    json.dumps({"kind": kind, "iteration": number, "loss": 7.0 - number, "seconds": 0.5}).encode()
    + b"\n"
    for number in range(3)
    for kind in ("train", "validation")
)


def go_on_with(path: Path) -> None:
    with writing_metrics(path.parent, 2, open_loggers(["tensorboard"]), print) as write:
        write(Validation(kind="validation", iteration=3, samples=1, loss=1.0, perplexity=2.7))
    shutil.rmtree(path.parent / "tensorboard")


SUMMARY = (
    b'{"parameters": 3, "iterations": 2, "tokens": 9, "layout": {"tp": 1}, "train_seconds": 1,'
    b' "tokens_per_second": 9}'
)
LEDGER = json.dumps(
    {
        "stages": [
            {
                "name": "clean",
                "documents_in": 3,
                "documents_out": 2,
                "dropped": {"empty": {"documents": 1}},
                "samples": {"empty": [{"id": "a:1", "excerpt": "b"}]},
            }
        ],
        "splits": {"train": {"documents": 2}},
    }
).encode()


def verify(path: Path) -> None:
    """Verify the run that a file is in, sealed anew from the file outwards; what does not hold is
    an error."""
    sealed_folders = [folder for folder in path.parents if (folder / MARKER).is_file()]
    if path.name != MARKER:
        for folder in sealed_folders:
            seal(folder)
    if broken := RunCheck(sealed_folders[-1]).broken:
        raise IntegrityFailure(broken[-1])


def of_checkpoint(name: str) -> Reader:
    """A file of a checkpoint, as it is verified, as training goes on with it, and as it is
    scored."""

    def read(path: Path) -> object:
        with suppress(IntegrityFailure):
            verify(path)
        folder = path.parent.parent if "/" in name else path.parent
        with suppress(IntegrityFailure):
            _read_state(folder)
        return (
            load_for_inference(folder),
            read_probe(folder),
            Tokenizer.load(folder / "tokenizer").encode("a fine text"),
        )

    return Reader(
        f"checkpoint {name}", packed(f"{TRAINING}/checkpoints/iter_0000006/{name}"), read, 5
    )


def of_reproduction(name: str) -> Reader:
    """A file of a reproduction, as it is verified and as its page is put together."""

    def read(path: Path) -> object:
        with suppress(IntegrityFailure):
            verify(path)
        return assemble(
            Inputs(next(folder for folder in path.parents if folder.parent.name == "runs"))
        )

    return Reader(f"reproduction {name}", packed(f"{REPRODUCTION}/{name}"), read, 5)


def torch_file(folder: Path) -> Path:
    values = {"model": {name: torch.ones(shape) for name, shape in SHAPES.items()}, "iteration": 3}
    torch.save(values | {"args": argparse.Namespace(num_layers=2, hidden_size=4)}, folder / "a.pt")
    return folder / "a.pt"


def refused_rows(folder: Path) -> Path:
    row = {"experiment": "2021/figure-6", "series": "a", "x": 1.0, "reason": "it does not fit"}
    return seal_simulated(find_experiment("2021/figure-6"), folder, [row]).path / NOT_RUN


CLUSTER = (ROOT / "experiments/clusters/b200.toml").read_bytes()
CLUSTER = CLUSTER.replace(b"fitted/transferred", b"experiments/clusters/dgx-a100-80g")
SOFTWARE = b'title = "a"\n'
SOFTWARE += (ROOT / "experiments/software/fitted/megatron-2019.toml").read_bytes()
READERS = (
    Reader("jsonl", bytes_at("a.jsonl", LINES), documents("jsonl"), 40),
    Reader(
        "jsonl.gz",
        bytes_at("a.jsonl.gz", gzip.compress(LINES, mtime=0)),
        documents("jsonl"),
        100,
        GZIP,
    ),
    Reader(
        "jsonl.zst",
        bytes_at("a.jsonl.zst", zstandard.compress(LINES)),
        documents("jsonl"),
        100,
        ZSTANDARD,
    ),
    Reader("parquet", table, documents("parquet"), 40, PARQUET),
    Reader("text", bytes_at("a.txt", "\n".join(TEXTS).encode()), documents("text")),
    Reader("token index", token_index, read_tokens),
    Reader(
        "safetensors",
        weights,
        lambda path: read_weights(path.parent, "", BUFFERS),
        form=SAFETENSORS,
    ),
    Reader("safetensors index", weight_index, lambda path: read_weights(path.parent, "", BUFFERS)),
    Reader("checkpoint index", tensor_index, read_tensors),
    Reader(
        "model configuration",
        bytes_at("a.toml", (ROOT / "experiments/models/355m.toml").read_bytes()),
        lambda path: load_config(path, RunConfig),
    ),
    Reader(
        "data recipe",
        bytes_at("a.toml", (ROOT / "data_pipeline/recipes/megatron-2019.toml").read_bytes()),
        lambda path: load_config(path, DataConfig),
    ),
    Reader("claims", claims, lambda path: load_claims(path.parent)),
    Reader("records", records, read_records),
    Reader("manifest", manifest, read_manifest),
    Reader("seal", sealed, lambda path: check_seal(path.parent)),
    Reader("metrics", bytes_at("metrics.jsonl", METRICS), go_on_with, 30),
    Reader("summary", bytes_at("summary.json", SUMMARY), lambda path: read_summary(path.parent)),
    Reader("ledger", bytes_at("ledger.json", LEDGER), lambda path: read_document(path, Ledger)),
    *map(
        of_checkpoint,
        (
            "config.json",
            "index.json",
            "lineage.json",
            "probe.json",
            "state.json",
            "statistics.json",
            "tokenizer/tokenizer.json",
            MARKER,
        ),
    ),
    *map(
        of_reproduction,
        (
            "manifest.json",
            "summary.json",
            "records.jsonl",
            "dataset.json",
            "ledger.json",
            "evaluations/355m-lambada.json",
            "evaluations/355m-wikitext103.json",
            "training/355m/metrics.jsonl",
            "training/355m/summary.json",
            MARKER,
        ),
    ),
    Reader(
        "dataset card",
        packed(f"{DATASET}/dataset.json"),
        lambda path: DatasetFacts.read(path.parent),
    ),
    Reader("training manifest", packed(f"{TRAINING}/manifest.json"), verify, 10),
    Reader("training metrics", packed(f"{TRAINING}/metrics.jsonl"), verify, 10),
    Reader("torch file", torch_file, read_torch_file, 20, TORCH),
    Reader(
        "tokenizer",
        packed(f"{DATASET}/tokenizer/tokenizer.json"),
        lambda path: Tokenizer.load(path.parent).encode("a fine text"),
    ),
    Reader("cluster", bytes_at("a.toml", CLUSTER), lambda path: load_cluster(str(path))),
    Reader(
        "software",
        bytes_at("a.toml", SOFTWARE),
        lambda path: load_cluster("dgx-2h-v100", str(path)),
    ),
    Reader(
        "job",
        bytes_at("a.toml", (ROOT / "experiments/jobs/355m.toml").read_bytes()),
        lambda path: load_config(path, Job),
    ),
    Reader("refused rows", refused_rows, foreign_results.read_elsewhere, 100),
    *foreign_models.READERS,
    *foreign_results.READERS,
)
