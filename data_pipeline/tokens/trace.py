"""The text of all samples of a training's iteration, with the documents they were packed from."""

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import orjson
from pydantic import AliasPath, Field

from mlm_repro.data_pipeline.document import written_documents
from mlm_repro.data_pipeline.files import trained_datasets
from mlm_repro.data_pipeline.tokens.samples import SamplePiece, training_samples
from mlm_repro.data_pipeline.tokens.token_file import TokenFile, blend, split_prefixes, texts_of
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.lineage.atomic import read_bytes
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.files import FileSchema, parse_document, read_document
from mlm_repro.lineage.run import MANIFEST, RunDirectory


class _Summary(FileSchema):
    """Facts of a run's summary.json: `dp`, the data-parallel size, 1 if the file has none. It tells
    which rank read a sample."""

    dp: int = Field(1, validation_alias=AliasPath("layout", "dp"))


class _Config(FileSchema):
    """The values of the configuration in a training run's manifest from which its samples are found
    again: the family of the model, the length of a sequence, the seed, the number of iterations and
    the global batch size."""

    family: str = Field(validation_alias=AliasPath("model", "family"))
    seq_length: int = Field(ge=1, validation_alias=AliasPath("model", "seq_length"))
    seed: int = Field(ge=0, lt=2**32, validation_alias=AliasPath("train", "seed"))
    iterations: int = Field(validation_alias=AliasPath("train", "iterations"))
    global_batch_size: int = Field(validation_alias=AliasPath("train", "global_batch_size"))


class _Batch(FileSchema):
    """The number of an iteration, its batch size, and the samples up to and with it, from its line
    in metrics.jsonl."""

    iteration: int
    batch_size: int = Field(ge=1)
    samples: int = Field(ge=1)


def trace_iteration(run: Path, iteration: int) -> Iterator[str]:
    """Yield texts to print, one after the other, that show the sequences of a training run's
    `iteration`, numbered from 1 as in its metrics.jsonl: a heading for each sequence of the global
    batch, and for each document in it a heading and its decoded tokens, which may have many lines.

    A sequence's heading has its index and, for a complete run, its data-parallel rank. Raises
    BadInput for anything but a training of a gpt2, for a run without that iteration, that is not
    complete while its batch still grows, with a metrics.jsonl that is unreadable or miscounts
    samples, or with a dataset that lacks a file; DataMissing if its dataset is missing or has
    changed; IntegrityFailure if a line of metrics.jsonl lacks a field, or another file of the run
    or the dataset is damaged. Errors of reading the dataset's texts in `documents`, such as
    ValueError for a damaged line, are passed on.
    """
    manifest = RunDirectory.open(run, "training").manifest
    config = parse_document(manifest["config"], _Config, f"{run / MANIFEST}")
    if config.family != "gpt2":
        raise BadInput(
            f"{run} trains a {config.family}, whose samples are not packed documents: `mlm-data"
            " trace` shows the samples of a gpt2 alone"
        )
    step, taken = _taken(run, iteration, config)
    datasets = trained_datasets(run)
    blended = (blend(split_prefixes(directory, "train"), weight) for directory, weight in datasets)
    parts = [(TokenFile(prefix), weight) for prefix, weight in chain.from_iterable(blended)]
    samples = training_samples(parts, taken, config.seq_length, config.seed)
    tokenizer = Tokenizer.load(datasets[0][0] / "tokenizer")
    summary = run / "summary.json"
    dp = read_document(summary, _Summary).dp if summary.is_file() else None
    if not step.batch_size <= step.samples <= taken:
        raise BadInput(
            f"metrics.jsonl of {run} cannot be right: after iteration {iteration:,} with a batch of"
            f" {step.batch_size:,} it counts {step.samples:,} samples, and {taken:,} in the whole"
            " training; restore that file from a copy"
        )
    for index in range(step.batch_size):
        number = step.samples - step.batch_size + index
        pieces = [*samples.pieces(number)]
        rank = f", data-parallel rank {index * dp // step.batch_size}" if dp else ""
        folder = pieces[0].file.prefix.parent
        yield (
            f"=== iteration {iteration:,}, sequence {index:,}{rank}: sample {number:,}, of {folder}"
        )
        yield from _show(pieces, tokenizer)


def _show(pieces: list[SamplePiece], tokenizer: Tokenizer) -> Iterator[str]:
    origins = _places(texts_of(pieces[0].file.prefix), {piece.document for piece in pieces})
    for document, start, tokens, file in pieces:
        end = start + len(tokens)
        size = int(file.sizes[document])
        yield (
            f"--- document {document:,}{origins.get(document, '')}, tokens {start:,} to"
            f" {end - 1:,} of {size:,}"
        )
        yield tokenizer.decode(tokens)


def _places(path: Path, documents: set[int]) -> dict[int, str]:
    """Return a dict from each number in `documents`, indices in a token file, to a text on that
    document's origin, in parentheses after a space: its id, its source, if any, and its line in the
    file at `path`, the JSON lines or Parquet file with the token file's documents. Documents that
    this file lacks are left out, and all are if there is no file. `documents` is not empty. Errors
    of reading a damaged file, such as ValueError, are passed on."""
    origins = {}
    rows = written_documents(path) if path.is_file() else iter(())
    for number, row in enumerate(islice(rows, max(documents) + 1)):
        if number in documents:
            source = f", read from {row.source}" if row.source else ""
            origins[number] = f" ({row.id}{source}; line {number + 1:,} of documents/{path.name})"
    return origins


def _taken(run: Path, iteration: int, config: _Config) -> tuple[_Batch, int]:
    """Return a pair: the line of `iteration` in the run's metrics.jsonl as a _Batch, and the number
    of samples in the whole training, which determines how they are shuffled: the ones taken up to
    the last line and, for an incomplete run, a batch for each iteration of `config` that is left.
    Raises BadInput if metrics.jsonl is unreadable, has no such iteration, or its batch still grows,
    so that the number is not known; IntegrityFailure if a line of an iteration does not fit its
    schema."""
    try:
        lines = [orjson.loads(line) for line in read_bytes(run / "metrics.jsonl").splitlines()]
    except (OSError, ValueError) as error:
        raise BadInput(
            f"metrics.jsonl of {run} cannot be read: {error}; put back an undamaged copy of it"
        ) from error
    iterations = [line for line in lines if isinstance(line, dict) and line.get("kind") == "train"]
    steps = {
        step.iteration: step
        for step in (parse_document(line, _Batch, "metrics.jsonl") for line in iterations)
    }
    if iteration not in steps:
        raise BadInput(
            f"{run} has no iteration {iteration:,}, which --step asks for: its metrics.jsonl goes"
            f" to {max(steps, default=0):,}; give --step an iteration that has a line in it"
        )
    last = steps[max(steps)]
    left = config.iterations - last.iteration
    if left and last.batch_size != config.global_batch_size:
        raise BadInput(
            f"{run} is not complete and its batch still grows, so that its samples, which depend on"
            " their number in the whole training, are not known yet: trace it when the batch has"
            " its full size, or the run is complete"
        )
    return steps[iteration], last.samples + left * last.batch_size
