"""Kinds of sealed directories: the files that each has, its name, its inputs, and what its files follow from.

Lists are closed: a directory that they do not describe is not verified. Imports no torch.
"""

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from mlm_repro.data_pipeline import derived as dataset
from mlm_repro.data_pipeline.files import DATASET, LEDGER, DataCard, Ledger
from mlm_repro.data_pipeline.passes.overlap import RESULT as OVERLAP
from mlm_repro.data_pipeline.stages import STAGES
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.run import derived as training
from mlm_repro.engine.run.files import METRICS, SUMMARY, TrainingSummary
from mlm_repro.engine.run.resolved import PLACES, SCHEMA
from mlm_repro.experiments import kept
from mlm_repro.experiments.benchmark import AGAINST
from mlm_repro.experiments.catalogue import ABLATION, Ablation, Experiment
from mlm_repro.experiments.files import EXPERIMENTS, FORECAST, LADDER, PLAN, RUNS
from mlm_repro.experiments.forecast import ladder, trainings
from mlm_repro.experiments.forecast.ablation import slug
from mlm_repro.experiments.reproduce import derived as reproduction
from mlm_repro.experiments.reproduce.files import ReproductionSummary
from mlm_repro.experiments.verdicts import load_results
from mlm_repro.lineage.chain import INDEX, LINEAGE, STATE
from mlm_repro.lineage.derived import Checked, Derived, Input, unlike
from mlm_repro.lineage.digest import MARKER, sha256_file
from mlm_repro.lineage.files import FileSchema
from mlm_repro.lineage.lock import LOCK
from mlm_repro.lineage.records import RECORDS
from mlm_repro.lineage.run import MANIFEST
from mlm_repro.reports import engines
from mlm_repro.reports.report import REPORT, Inputs, assemble

KEYS = {"name", "kind", "identity", "created", "config", "outside_identity", "config_digest", "parents", "environment"}
"""Keys of every manifest."""
NAME = "[^/]+"
PIECES = rf"(model|optimizer|memory)-{NAME}\.safetensors|(statistics|probe|tokenizer/tokenizer(_config)?)\.json"
CHECKPOINT = rf"(config|index|lineage|state)\.json|{PIECES}|{MARKER}"
DOCUMENTS = rf"(quarantine|duplicates|left_in|({NAME}/)?shard-\d+)\.jsonl"
DATASETS = rf"{DOCUMENTS}|documents/{NAME}\.jsonl|{NAME}_text_document\.(bin|idx)|tokenizer/tokenizer(_config)?\.json"
INNER_RUNS = rf"experiments?-{NAME}/(manifest\.json|(runs|records)\.jsonl|not_run\.json|{MARKER})"
"""Files of the runs of experiments inside a reproduction."""
FORMER_PARTS = rf"examples\.jsonl|evaluations/{NAME}\.json|training/{NAME}/(metrics\.jsonl|(summary|timeline)\.json)"
"""Files of a reproduction of the first release."""
OUTSIDE = re.compile(r"(.*/)?\..*|(wandb|mlflow)/.*")
"""Hidden files and what libraries wrote, which no seal covers."""


class Kind(NamedTuple):
    """A kind of sealed directory."""

    files: dict[str, type[FileSchema] | None]
    """Files that it has; the schemas of those in which no other key may stand."""
    others: str = "(?!)"
    """Regular expression of the further files that it may have."""
    name: Callable[[dict[str, Any]], str] = lambda config: NAME
    """Regular expression of the name that its configuration gives."""
    derived: tuple[Derived, ...] = ()
    """What its files follow from."""
    inputs: Callable[[Checked], Iterable[Input]] = lambda run: ()
    outside: frozenset[str] = frozenset()
    """Sections of its configuration outside its identity."""
    schema: int = 1
    """Version of its schema, by which this program reads its settings."""
    model: type[BaseModel] | None = None
    """The schema of its configuration or of a `section` of it, which knows the defaults."""
    section: str = ""

    def settings(self, config: dict[str, Any]) -> dict[str, Any]:
        """The values of a configuration that differ from their defaults; the identity is of them."""
        if self.model is None:
            return config
        known = (
            config[self.section]
            if self.section
            else {key: config[key] for key in config if key in self.model.model_fields}
        )
        differing = self.model.model_validate(known).model_dump(mode="json", exclude_defaults=True)
        if self.section:
            return config | {self.section: differing}
        return {key: value for key, value in config.items() if key not in known} | differing


def _named(config: dict[str, Any]) -> str:
    return re.escape(config["name"])


def _experiment(config: dict[str, Any]) -> str:
    return f"experiment-{re.escape(slug(config['experiment']['name']))}"


def _loaded(run: Checked) -> Iterator[tuple[str, Any, Any]]:
    """Nothing: an ablation's records are compared with its kept trainings wherever they are loaded."""
    load_results([run.path])
    return iter(())


def _runs_inside(run: Checked) -> Iterator[Input]:
    """The trainings of a reproduction, the runs of experiments inside it, and those on its page."""
    yield from reproduction.inputs(run)
    inner = [path for path in run.path.glob("experiment*") if path.is_dir() and not path.is_symlink()]
    built = Inputs.of_built(run.path).runs if (run.path / REPORT).is_dir() else ()
    for path in dict.fromkeys((*inner, *built)):
        yield Input("", path, "")


def _page(run: Checked) -> Iterator[tuple[str, Any, Any]]:
    """The files of the page of a reproduction, by all others."""
    if not (run.path / REPORT).is_dir():
        return
    from mlm_repro.reports.page import write_report

    inputs = Inputs.of_built(run.path)
    with tempfile.TemporaryDirectory() as folder:
        write_report(assemble(inputs), Path(folder))
        said, made = ({
            str(path.relative_to(place)): sha256_file(path)
            for path in place.rglob("*") if path.is_file() and path.name != MARKER
        } for place in (run.path / REPORT, Path(folder)))  # fmt: skip
    yield f"{REPORT}, which `{inputs.command}` makes again", said, made


LEDGERS: dict[str, type[FileSchema] | None] = {LEDGER: Ledger}
CARDS = LEDGERS | {DATASET: DataCard}
KINDS = {
    **{f"data-{stage.verb}": Kind(LEDGERS, DOCUMENTS, derived=(dataset.ledger,)) for stage in STAGES},
    **{f"data-{verb}": Kind(CARDS, DATASETS, derived=(dataset.dataset,)) for verb in ("tokenize", "import", "merge")},
    "data-overlap": Kind({OVERLAP: None}, derived=(dataset.overlap,)),
    "data": Kind(CARDS, DATASETS, _named, (dataset.dataset,)),
    "training": Kind(
        {METRICS: None, SUMMARY: TrainingSummary},
        rf"timeline\.json|tensorboard/events\.{NAME}|checkpoints/iter_\d{{7}}/({CHECKPOINT})",
        _named, (training.files,), training.inputs, PLACES, SCHEMA, RunConfig,
    ),
    "experiment": Kind(
        {RECORDS: None}, r"not_run\.json", lambda config: f"{_experiment(config)}(-measured)?", (kept.numbers,),
        model=Experiment, section="experiment",
    ),
    EXPERIMENTS: Kind(
        {RUNS: None, RECORDS: None}, name=lambda config: EXPERIMENTS, derived=(kept.numbers, kept.gathered)
    ),
    "forecast": Kind(
        {FORECAST: None}, name=lambda config: f"{min(config.keys() - {'sha256'})}-forecast",
        derived=(trainings.sealed_forecast,),
    ),
    ABLATION: Kind(
        {FORECAST: None, RUNS: None, RECORDS: None}, rf"sweeps/{NAME}\.json",
        lambda config: f"{_experiment(config)}-effects", (_loaded, kept.trainings(trainings.kept)),
        model=Ablation, section=ABLATION,
    ),
    "ladder": Kind(
        {DATASET: DataCard, PLAN: None, FORECAST: None, LADDER: None, RUNS: None, RECORDS: None},
        r"evaluations\.jsonl|report/ladder\.\w+", lambda config: "ladder",
        (ladder.outcome, kept.trainings(trainings.kept)),
    ),
    "reproduction": Kind(
        CARDS | {RECORDS: None, SUMMARY: ReproductionSummary},
        rf"scores\.json|(runs|evaluations)\.jsonl|report/.+|{INNER_RUNS}|{FORMER_PARTS}",
        lambda config: rf"reproduce-{re.escape(config['target'])}(-\w+)?",
        (reproduction.runs, reproduction.evaluations, reproduction.numbers, reproduction.data, _page), _runs_inside,
    ),
    "against": Kind(
        {AGAINST: None}, name=lambda config: f"against-{NAME}", derived=(engines.by_its_curves,),
        outside=frozenset({"data"}), model=RunConfig,
    ),
    "checkpoint": Kind(dict.fromkeys((INDEX, LINEAGE, STATE)), CHECKPOINT),
    "imported checkpoint": Kind(dict.fromkeys((INDEX, "origin.json")), rf"config\.json|{PIECES}|huggingface/.+"),
    "report": Kind(dict.fromkeys(("index.html", "sources.json")), rf"figures/{NAME}\.(csv|svg|pdf|tex)"),
    "oracle": Kind(dict.fromkeys(("README.md", "table.csv")), "(model|tasks|texts)/.+"),
}  # fmt: skip
"""Kinds of runs by the word in their manifests; the last four have none."""


def kind_of(directory: Path) -> str:
    """The kind of a sealed directory without a manifest; empty for one that is of none."""
    has = {path.name for path in directory.iterdir()}
    return next((name for name in list(KINDS)[-4:] if has.issuperset(KINDS[name].files)), "")


def misfits(directory: Path, kind: Kind, values: dict[str, Any] | None = None) -> Iterator[str]:
    """A sentence for each file, key and name that a directory of this kind does not have, or must not have."""
    paths = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())
    here = {path for path in paths if not OUTSIDE.fullmatch(path)}
    required = {*kind.files, MARKER, *([MANIFEST] if values else [])}
    yield from (f"{directory.name} has no {name}" for name in sorted(required - here))
    others = (name for name in sorted(here - required) if not re.fullmatch(kind.others, name))
    yield from (f"{directory.name} has {name}, which no run of its kind has" for name in others)
    if not values:
        return
    yield from (f"{MANIFEST} of {directory.name} has no {key}" for key in sorted(KEYS - values.keys()))
    if not set(values["outside_identity"]) <= kind.outside:
        yield f"{MANIFEST} of {directory.name} has more outside of its identity than where the run takes place"
    if values.get("schema_version") == kind.schema:
        counted = {key: value for key, value in kind.settings(values["config"]).items() if key not in kind.outside}
        yield from unlike(f"{MANIFEST} of {directory.name}: settings", values["settings"], counted)
    name, named = values["name"], f"{values['name']}-{values['identity'][:8]}"
    if not re.fullmatch(kind.name(values["config"]), name):
        yield f"{directory.name} is called {name}, which is not the name of what it computes"
    if directory.name not in (name, named):
        yield f"{directory.name} was renamed or copied over another: it began as {named}"


def hidden(directory: Path) -> list[str]:
    """Names of hidden files and of folders that libraries wrote."""
    paths = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return sorted({path.parts[0] for path in paths if path.name != LOCK and OUTSIDE.fullmatch(path.as_posix())})
