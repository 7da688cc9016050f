"""A page of one training: its curves, numbers, generated text, evaluations and data, in one file to send."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from mlm_repro.data_pipeline.files import DATASET, LEDGER, DataCard, Ledger, TrainedOn, named_datasets
from mlm_repro.engine.costs import parameter_count, tokens_trained
from mlm_repro.engine.run.files import METRICS, SUMMARY, Step, TrainingSummary, Validation, read_steps, read_validations
from mlm_repro.engine.run.resolved import read_config
from mlm_repro.evaluation.schema import Result
from mlm_repro.lineage.chain import complete_checkpoints
from mlm_repro.lineage.digest import MARKER, check_seal, is_sealed, read_digest
from mlm_repro.lineage.errors import UserError
from mlm_repro.lineage.files import Manifest, parse_document, read_document, read_object
from mlm_repro.lineage.numbers import exact, show
from mlm_repro.lineage.progress import format_duration
from mlm_repro.lineage.run import MANIFEST, RunDirectory
from mlm_repro.reports import tables
from mlm_repro.reports.exhibit import Exhibit, Table
from mlm_repro.reports.figures import Layer, Point, draw_panels
from mlm_repro.reports.load import Problems
from mlm_repro.reports.page import shell
from mlm_repro.reports.render import render_all
from mlm_repro.reports.reproduced import evaluations_exhibit, ledger_exhibit
from mlm_repro.reports.style import template_environment

SHOWN, LISTED = 400, 100
"""Most points of a curve, and most iterations in the table."""
CURVES: dict[str, tuple[str, str, str]] = tables.AXES["curves"]
"""Id, title and axis of the curves beside the loss, by their key in the metrics."""
TRAINED = ("iteration", "samples", "loss", *CURVES)
VALIDATED = ("iteration", "samples", "loss", "perplexity")
"""Numbers in the tables of iterations and of validations."""


@dataclass(frozen=True)
class Training:
    """A training run as far as it has come."""

    path: Path
    manifest: Manifest
    size: tuple[int, int] | None
    """Parameters, and tokens of the whole training; None if this program does not know a key of its configuration."""
    summary: TrainingSummary | None
    """None if it is unfinished."""
    steps: Sequence[Step]
    validations: Sequence[Validation]
    datasets: Sequence[TrainedOn]
    ledger: Ledger | None
    card: DataCard | None
    evaluations: dict[str, Result]
    """Results of its checkpoints by the stem of the file beside the run."""
    samples: Sequence[dict[str, Any]]
    """Prompts with the continuations by its checkpoints."""
    state: str
    problems: Problems

    @property
    def exhibits(self) -> dict[str, Exhibit]:
        """Curves, and what there is besides."""
        return {exhibit.name: exhibit for exhibit in self._exhibits()}

    def _exhibits(self) -> Iterator[Exhibit]:
        if self.steps:
            curves = [binned("training", self.steps, "loss")]
            if points := tuple(Point(each.iteration, each.loss) for each in self.validations):
                curves.append(Layer("validation", 2, "measured", points))
            yield _curve("loss", "Loss", "loss (nats)", curves)
            for key, (name, title, label) in CURVES.items():
                if (curve := binned(label, self.steps, key)).points:
                    yield _curve(name, title, label, [curve])
        if self.evaluations:
            yield evaluations_exhibit(self.evaluations, [])
        if self.ledger:
            yield ledger_exhibit(self.ledger)

    @property
    def listed(self) -> list[Table]:
        """Iterations, evenly spread up to the last if there are many, and validations."""
        shown = self.steps[:: -(len(self.steps) // LISTED + 1)][::-1]
        title = f"{len(shown)} of {len(self.steps)} recorded iterations"
        tables_of = ((title, TRAINED, shown), ("Validations", VALIDATED, self.validations))
        return [Table(names, [[exact(getattr(line, name)) for name in names] for line in lines], 0, name)
                for name, names, lines in tables_of if lines]  # fmt: skip


def binned(name: str, steps: Sequence[Step], key: str) -> Layer:
    """A curve of at most `SHOWN` points: of more iterations, means with the least and the greatest."""
    values = [(step.iteration, value) for step in steps if (value := getattr(step, key)) is not None]
    apart = -(-len(values) // SHOWN) or 1
    points = []
    for start in range(0, len(values), apart):
        places, numbers = zip(*values[start : start + apart], strict=True)
        points.append(Point(places[-1], fmean(numbers), min(numbers), max(numbers), len(numbers)))
    return Layer(name, 0, "measured", tuple(points))


def _curve(name: str, title: str, label: str, curves: list[Layer]) -> Exhibit:
    ends = "; ".join(f"{curve.series} {show(curve.final)}" for curve in curves)
    caption = [f"At the end: {ends}."]
    if curves[0].repeats > 1:
        caption.append(f"Points are means of {curves[0].repeats} iterations, the band their least and greatest.")
    alt = f"Line chart of {label} over iterations. {caption[0]}"
    return Exhibit(name, title, caption, Table((), ()), "", partial(draw_panels, {"": curves}, label, column=True), alt,
                   column=True)  # fmt: skip


def load_training(run: Path) -> Training:
    """Read a training, finished or not. Raises BadInput for a directory that holds none.

    A file that is missing or damaged becomes a Problem.
    """
    directory = RunDirectory.open(run, "training").path
    manifest, problems = read_document(directory / MANIFEST, Manifest), Problems()
    state = "unfinished: it was stopped, failed or is at work"
    if is_sealed(directory):
        state = "complete, but changed since"
        with problems.noting(MARKER, "The run"):
            state = f"complete and unchanged, digest {check_seal(directory)[:16]}"
    read: list[Any] = [[], [], []]
    readers: tuple[Callable[[Path], list[Any]], ...] = (read_steps, read_validations, named_datasets)
    for place, reader in enumerate(readers):
        with problems.noting(METRICS, "A part of the run"):
            read[place] = reader(directory)
    ledger = card = None
    if read[2]:
        data = max(read[2], key=lambda each: each.weight)
        if len(read[2]) > 1:
            problems.add(DATASET, f"Of {len(read[2])} datasets this is the one of the largest share.", damaged=False)
        if data.is_here:
            ledger = problems.document(data.place / LEDGER, Ledger, LEDGER, "The data ledger")
            card = problems.document(data.place / DATASET, DataCard, DATASET, "The data card")
        else:
            problems.add(DATASET, f"The dataset {data.place} is not here, or was built anew since.", damaged=False)
    evaluations, samples = _scored(directory, problems)
    summary = problems.document(directory / SUMMARY, TrainingSummary, SUMMARY, "The summary")
    size = None
    with problems.noting(MANIFEST, "The size of the model"):
        config = read_config(manifest.model_dump(), directory / MANIFEST)
        size = parameter_count(config.model), tokens_trained(config.model, config.train)
    return Training(
        directory,
        manifest,
        size,
        summary,
        read[0],
        read[1],
        read[2],
        ledger,
        card,
        evaluations,
        samples,
        state,
        problems,
    )


def _scored(run: Path, problems: Problems) -> tuple[dict[str, Result], list[dict[str, Any]]]:
    """Results of the run's checkpoints, and text by them, in the JSON files of `mlm-eval` beside the run."""
    digests = {read_digest(checkpoint) for checkpoint in complete_checkpoints(run)}
    evaluations, samples = dict[str, Result](), []
    for path in sorted(run.parent.glob("*.json")):
        with suppress(UserError):
            values = read_object(path)
            several = values.get("results")
            named = several.items() if isinstance(several, dict) else [("", values)]
            for task, each in named:
                if not isinstance(each, dict) or each.get("checkpoint_digest") not in digests:
                    continue
                if "continuation" in each:
                    samples.append(each)
                    continue
                with problems.noting(path.name, "An evaluation"):
                    name = f"{path.stem}-{task}" if task else path.stem
                    evaluations[name] = parse_document(each, Result, str(path))
    return evaluations, samples


def render_training(training: Training) -> str:
    """The HTML text of a training's page, which refers to nothing outside itself."""
    exhibits = training.exhibits
    context = {
        "run": training, "exhibits": exhibits, "drawings": render_all(exhibits.values()), "alone": True,
        "card": training.card, "ledger": training.ledger, "ours": "measured", "tables": tables,
        "curves": [exhibit for exhibit in exhibits.values() if exhibit.column], "duration": format_duration,
    }  # fmt: skip
    return template_environment().get_template("run.html").render(shell() | context)
