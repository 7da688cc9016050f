"""Kinds of sealed directories: the files that each must and may have, and its name.

Lists are closed: a directory that they do not describe is not verified. Imports no torch.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.data_pipeline.files import DATASET, LEDGER
from mlm_repro.data_pipeline.stages import STAGES
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.run.files import METRICS, STATISTICS, SUMMARY
from mlm_repro.engine.run.resolved import PLACES, SCHEMA
from mlm_repro.experiments.benchmark import AGAINST
from mlm_repro.experiments.catalogue import ABLATION, Ablation, Experiment
from mlm_repro.experiments.files import EXPERIMENTS, FORECAST, LADDER, PLAN, RUNS
from mlm_repro.experiments.forecast.ablation import slug
from mlm_repro.lineage.atomic import parse_json
from mlm_repro.lineage.chain import CHECKPOINTS, CONFIG, INDEX, LINEAGE, STATE
from mlm_repro.lineage.digest import MARKER
from mlm_repro.lineage.files import unlike
from mlm_repro.lineage.lock import LOCK
from mlm_repro.lineage.records import RECORDS
from mlm_repro.lineage.run import MANIFEST

KEYS = {"name", "kind", "identity", "created", "config", "outside_identity", "config_digest", "parents", "environment"}
"""Keys of every manifest."""
NAME = "[^/]+"
TOKENIZER = "tokenizer/tokenizer.json"
PIECES = rf"(model|optimizer|memory)-{NAME}\.safetensors|(statistics|probe|tokenizer/tokenizer(_config)?)\.json"
CHECKPOINT = rf"(config|index|lineage|state)\.json|{PIECES}|{MARKER}"
DOCUMENTS = rf"(quarantine|duplicates|dropped|left_in|({NAME}/)?shard-[0-9]+)\.jsonl"
TEXTS = rf"documents/{NAME}\.(jsonl|parquet)"
DATASETS = rf"{DOCUMENTS}|{TEXTS}|{NAME}_text_document\.(bin|idx)|tokenizer/tokenizer(_config)?\.json"
INNER_RUNS = rf"experiments?-{NAME}/(manifest\.json|(runs|records)\.jsonl|not_run\.json|{MARKER})"
"""Files of the runs of experiments inside a reproduction."""
FORMER_PARTS = rf"examples\.jsonl|evaluations/{NAME}\.json|training/{NAME}/(metrics\.jsonl|(summary|timeline)\.json)"
"""Files of a reproduction of the first release."""
OUTSIDE = re.compile(r"(.*/)?\..*|(wandb|mlflow)/.*")
"""Hidden files and what libraries wrote, which no seal covers."""


class Kind(NamedTuple):
    """A kind of sealed directory."""

    files: tuple[str, ...]
    """Files that it has."""
    others: str = "(?!)"
    """Regular expression of the further files that it may have."""
    name: Callable[[dict[str, Any]], str] = lambda config: NAME
    """Regular expression of the name that its configuration gives."""
    outside: frozenset[str] = frozenset()
    """Sections of its configuration outside its identity."""
    settings: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config
    """The values of its configuration that differ from their defaults; its identity is of them."""
    schema: int = 1
    """Version of its schema, by which this program reads its settings."""
    free: tuple[str, ...] = ()
    """Files, each with keys, that nothing contradicts; `mlm-verify run` prints them."""


def _experiment(config: dict[str, Any]) -> str:
    return f"experiment-{re.escape(slug(config['experiment']['name']))}"


def _differing(model: type[BaseModel], values: dict[str, Any]) -> dict[str, Any]:
    """The values that differ from the defaults of a model."""
    return model.model_validate(values).model_dump(mode="json", exclude_defaults=True)


def _differing_of(section: str, model: type[BaseModel]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda config: config | {section: _differing(model, config[section])}


def _against(config: dict[str, Any]) -> dict[str, Any]:
    recipe = {key: value for key, value in config.items() if key in RunConfig.model_fields}
    return {key: value for key, value in config.items() if key not in recipe} | _differing(RunConfig, recipe)


ALWAYS_FREE = "manifest.json created", "manifest.json environment", "a key left out where that means 0, no or nothing"
FREE_COUNTS = (
    "ledger.json *.samples", "ledger.json *.seconds", "ledger.json *.note", "ledger.json *.changed",
    "ledger.json shards", "ledger.json blank_lines", "duplicates.jsonl", "left_in.jsonl", "quarantine.jsonl",
    "dropped.jsonl", "*.jsonl *.id", "ledger.json near_duplicates.expected_candidate_precision",
)  # fmt: skip
FREE_CARD = "dataset.json language", "tokenizer/*.json"
KINDS = {
    **{f"data-{stage.verb}": Kind((LEDGER,), DOCUMENTS, free=FREE_COUNTS) for stage in STAGES},
    **dict.fromkeys(
        ("data-tokenize", "data-import", "data-merge"),  # the last of earlier versions
        Kind((LEDGER, DATASET), DATASETS, free=FREE_COUNTS + FREE_CARD),
    ),
    "data-overlap": Kind(("overlap.json",)),
    "data": Kind(
        (LEDGER, DATASET), DATASETS, lambda config: re.escape(config["name"]),
        settings=lambda config: DataConfig.model_validate(config).identity(), free=FREE_COUNTS + FREE_CARD,
    ),
    "training": Kind(
        (METRICS, SUMMARY), rf"timeline\.json|tensorboard/events\.{NAME}|checkpoints/iter_[0-9]{{7,}}/({CHECKPOINT})",
        lambda config: re.escape(config["name"]), PLACES, lambda config: _differing(RunConfig, config), SCHEMA,
        ("timeline.json", "summary.json memory", "summary.json layout", "metrics.jsonl *.seconds",
         "metrics.jsonl *.tokens_per_second", "metrics.jsonl *.model_tflops", "metrics.jsonl *.spike",
         "checkpoints/* seconds", "checkpoints/* loss_scaler", "checkpoints/*/probe.json", "checkpoints/* *.dim",
         "manifest.json layouts"),
    ),
    "experiment": Kind((RECORDS,), r"not_run\.json", lambda config: f"{_experiment(config)}(-measured)?",
                       settings=_differing_of("experiment", Experiment)),
    EXPERIMENTS: Kind((RUNS, RECORDS), name=lambda config: EXPERIMENTS),
    "forecast": Kind((FORECAST,), name=lambda config: f"{min(config.keys() - {'sha256'})}-forecast"),
    ABLATION: Kind(
        (FORECAST, RUNS, RECORDS), rf"sweeps/{NAME}\.json", lambda config: f"{_experiment(config)}-effects",
        settings=_differing_of(ABLATION, Ablation),
    ),
    "ladder": Kind(
        (DATASET, PLAN, FORECAST, LADDER, RUNS, RECORDS), r"evaluations\.jsonl|report/ladder\.\w+",
        lambda config: "ladder",
    ),
    "reproduction": Kind(
        (DATASET, LEDGER, RECORDS, SUMMARY),
        rf"scores\.json|(runs|evaluations)\.jsonl|report/.+|{INNER_RUNS}|{FORMER_PARTS}",
        lambda config: rf"reproduce-{re.escape(config['target'])}(-\w+)?",
        free=("*evaluations* *environment", "*evaluations* *checkpoint", "*evaluations* *dtype",
              "*evaluations* *seconds", "*evaluations* *warnings", "*evaluations* *backend", "*evaluations* *checked",
              "*evaluations* *window", "*evaluations* *megatron",
              "*examples.jsonl", "*timeline", "summary.json reason", "summary.json commands",
              "records.jsonl *.note", "records.jsonl *.source"),
    ),
    "against": Kind((AGAINST,), name=lambda config: f"against-{NAME}", outside=frozenset({"data"}), settings=_against),
    "checkpoint": Kind((CONFIG, INDEX, LINEAGE, STATE, STATISTICS, "probe.json", TOKENIZER), CHECKPOINT),
    "imported checkpoint": Kind((INDEX, "origin.json"), rf"config\.json|{PIECES}|huggingface/.+"),
    "report": Kind(("index.html", "sources.json"), rf"figures/{NAME}\.(csv|svg|pdf|tex)"),
    "oracle": Kind(("README.md", "table.csv"), "(model|tasks|texts)/.+"),
}  # fmt: skip
"""Kinds of runs by the word in their manifests; the last four have none."""


def kind_of(directory: Path) -> str:
    """The kind of a sealed directory without a manifest; empty for one that is of none."""
    if directory.parent.name == CHECKPOINTS:
        return "checkpoint"
    has = {path.name for path in directory.iterdir()}
    return next((name for name in list(KINDS)[-4:] if has.issuperset(KINDS[name].files)), "")


def parts_within(run: Path) -> list[Path]:
    """Sealed directories inside of a run, and all that lie where its checkpoints do, without hidden ones."""
    markers = (marker.parent for marker in run.rglob(MARKER))
    places = {*markers, *(path for path in (run / CHECKPOINTS).glob("*") if path.is_dir())} - {run}
    return sorted(path for path in places if not OUTSIDE.fullmatch(f"{path.relative_to(run).as_posix()}/"))


def misfits(directory: Path, kind: Kind, values: dict[str, Any] | None = None) -> Iterator[str]:
    """A sentence for each file, key and name that a directory of this kind does not have, or must not have."""
    paths = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*")}
    paths = {name: path for name, path in paths.items() if not OUTSIDE.fullmatch(name)}
    links = {name for name, path in paths.items() if path.is_symlink() and not _is_name_for(path)}
    yield from (f"{directory.name} has {name}, which is a link: it could lead anywhere" for name in sorted(links))
    here = {name for name, path in paths.items() if not path.is_dir()}
    for name in sorted(name for name in here if name.endswith((".json", ".jsonl", MARKER))):
        yield from _repeated(paths[name], f"{directory.name}/{name}")
    required = {*kind.files, MARKER, *([MANIFEST] if values else [])}
    yield from (f"{directory.name} has no {name}" for name in sorted(required - here))
    others = (name for name in sorted(here - required) if not re.fullmatch(kind.others, name, re.ASCII))
    yield from (f"{directory.name} has {name}, which no run of its kind has" for name in others)
    if not values:
        return
    yield from (f"{MANIFEST} of {directory.name} has no {key}" for key in sorted(KEYS - values.keys()))
    if not set(values["outside_identity"]) <= kind.outside:
        yield f"{MANIFEST} of {directory.name} has more outside of its identity than where the run takes place"
    if values.get("schema_version") == kind.schema:
        counted = {key: value for key, value in kind.settings(values["config"]).items() if key not in kind.outside}
        yield from unlike(
            f"{MANIFEST} of {directory.name}: settings", values["settings"], counted, "its configuration has"
        )
    name, named = values["name"], f"{values['name']}-{values['identity'][:8]}"
    if not re.fullmatch(kind.name(values["config"]), name):
        yield f"{directory.name} is called {name}, which is not the name of what it computes"
    if directory.name not in (name, named):
        yield f"{directory.name} was renamed or copied over another: it began as {named}"


def _is_name_for(link: Path) -> bool:
    """True for a run's short name beside it."""
    target = os.readlink(link)
    return bool(re.fullmatch(rf"{re.escape(link.name)}-[0-9a-f]{{8}}", target))


def _repeated(path: Path, where: str) -> Iterator[str]:
    """A sentence for a file with a key that stands twice in one object: readers take one of the values."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(values := dict(pairs)) < len(pairs):
            raise KeyError
        return values

    text = path.read_bytes()
    try:
        for each in text.splitlines() if path.suffix == ".jsonl" else (text,):
            parse_json(each, once)
    except KeyError:
        yield f"{where} has a key twice"
    except ValueError:
        yield f"{where} is not JSON"


def hidden(directory: Path) -> list[str]:
    """Names of hidden files and of folders that libraries wrote."""
    paths = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return sorted({path.parts[0] for path in paths if path.name != LOCK and OUTSIDE.fullmatch(path.as_posix())})
