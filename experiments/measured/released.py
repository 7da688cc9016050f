"""Scores of released checkpoints by the protocols that published numbers name: GPT-2's four sizes
and Megatron-LM's 345M.

A checkpoint is looked for under MLM_MODELS_DIR and in the hub's cache, then downloaded from the
hub. Its numbers are `measured` only if it is the released one. To prove that, the content is
compared with the SHA-256 that the hub states for a file, which the hub's cache and `mlm-eval fetch`
record. Other weights are a stand-in, whose numbers answer no claim.
"""

import os
from collections.abc import Iterator
from functools import cache, partial
from itertools import chain
from pathlib import Path

from mlm_repro.data_pipeline.contamination.testsets import find_test_set
from mlm_repro.evaluation.checkpoints import EvaluatedCheckpoint
from mlm_repro.evaluation.evaluate import Settings, evaluate
from mlm_repro.evaluation.models.hub_models import cached_model, is_as_fetched
from mlm_repro.evaluation.models.places import Place
from mlm_repro.evaluation.tasks.names import TASKS, build_task
from mlm_repro.evaluation.tasks.perplexity import PerplexityTask, sliding_stream
from mlm_repro.evaluation.tasks.wikitext103 import MEGATRON, read_wikitext
from mlm_repro.evaluation.windows import megatron_windows
from mlm_repro.experiments.catalogue import Experiment
from mlm_repro.experiments.files import PARTIAL, STAND_IN
from mlm_repro.experiments.sealed import Line, lines
from mlm_repro.lineage.config import read_toml
from mlm_repro.lineage.digest import sha256_file
from mlm_repro.lineage.errors import DataMissing, Interrupted
from mlm_repro.lineage.records import Kind

MODELS_VARIABLE = "MLM_MODELS_DIR"
OWNER = "openai-community/"
"""Owner of GPT-2's weights on the hub, which does not have Megatron-LM's checkpoint."""
MODELS = read_toml(Path(__file__).with_name("released.toml"))
"""Nested dicts by experiment, directory, series and quantity; the innermost value is a list: the
protocol, the field of its result, and the factor that gives the claim's unit."""


def measure_released(experiment: Experiment, limit: int | None = None) -> list[Line]:
    """Score every model of the experiment that is found, and return a list with a line, a dict with
    a record's fields, for each of its quantities; `limit` is the most windows or examples of each
    test, None for all. A model that is not found is left out with a printed line. A number that
    comes from other weights than the released ones, or from a part of a test, has the kind
    `scaled`; its note begins with STAND_IN for other weights, else with PARTIAL.

    Raises DataMissing if no model is found, or if a test file is missing, IntegrityFailure for a
    damaged checkpoint, and BadInput for one that cannot be scored.
    """
    numbers = []
    for name, path, is_released in _found(experiment):
        series = MODELS[experiment.name][name]
        every = chain.from_iterable(many.values() for many in series.values())
        tasks = {
            each: partial(build_task, each)
            if each in TASKS
            else partial(_validation, find_test_set(each))
            for each in dict.fromkeys(protocol for protocol, *_ in every)
        }
        done = evaluate(Place.find(path), tasks, Settings(), limit)
        weights = ", ".join(f"{file.name} {_digest(file)[:16]}" for file in _weights(path))
        for title, quantities in series.items():
            for quantity, (protocol, field, factor) in quantities.items():
                if protocol in done.missing:
                    raise DataMissing(done.missing[protocol])
                result = done.done[protocol].result
                kind: Kind = "measured" if is_released and not result.partial else "scaled"
                note = f"{result.protocol}; {weights}"
                if result.partial:
                    note = f"{PARTIAL}: {note}"
                if not is_released:
                    note = f"{STAND_IN}: {note}"
                values = {quantity: factor * getattr(result, field)}
                numbers += lines(title, values, kind, note=note)
    return numbers


def _validation(path: Path, evaluated: EvaluatedCheckpoint) -> PerplexityTask:
    """Return the PerplexityTask of Megatron-LM's WikiText-103 recipe on the validation file `path`,
    for the tokenizer and the context of the checkpoint `evaluated`. Raises BadInput if the file
    cannot be read, IntegrityFailure if it is not the official one."""
    text = read_wikitext("wikitext103-valid", path, "wikitext103-valid")
    tokenizer = evaluated.tokenizer
    windows = megatron_windows(evaluated.model.seq_length)
    return PerplexityTask(text, sliding_stream(text, MEGATRON, tokenizer, *windows), tokenizer)


def _found(experiment: Experiment) -> Iterator[tuple[str, Path, bool]]:
    """Yield a tuple for each of the experiment's models that is in the folder MLM_MODELS_DIR or in
    the hub's cache, or can be downloaded from the hub: its name, its directory, and True if its
    weights are the released ones. A missing model is left out with a line on standard output.
    Raises DataMissing if all are missing."""
    missing = []
    for name in MODELS[experiment.name]:
        root = os.environ.get(MODELS_VARIABLE)
        if root and (Path(root) / name).is_dir():
            yield name, Path(root) / name, is_as_fetched(Path(root) / name, OWNER + name)
            continue
        try:
            path = cached_model(OWNER + name)
        except (DataMissing, Interrupted) as error:
            missing.append(name)
            print(f"{name}: not under ${MODELS_VARIABLE}, and left out: {error}")
        else:
            # the hub's cache names a file by the SHA-256 that its content had at the hub
            yield name, path, all(file.resolve().name == _digest(file) for file in _weights(path))
    if len(missing) == len(MODELS[experiment.name]):
        raise DataMissing(
            f"none of {', '.join(missing)} is under ${MODELS_VARIABLE} or in the hub's cache, and"
            " none could be downloaded: put one there and run again: mlm-experiment run"
            f" {experiment.name}"
        )


def _weights(path: Path) -> list[Path]:
    return sorted(
        file for file in path.rglob("*") if file.suffix in (".safetensors", ".bin", ".pt")
    )


_digest = cache(sha256_file)
