"""A page of one training: its curves, numbers, generated text, evaluations and data, in one file to
send."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlm_repro.data_pipeline.files import (
    DATASET,
    LEDGER,
    DataCard,
    Ledger,
    TrainedOn,
    named_datasets,
)
from mlm_repro.engine.costs import parameter_count, tokens_trained
from mlm_repro.engine.run.files import (
    SUMMARY,
    Step,
    TrainingSummary,
    Validation,
    read_steps,
    read_validations,
)
from mlm_repro.engine.run.resolved import read_config
from mlm_repro.evaluation.schema import Result
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.chain import complete_checkpoints
from mlm_repro.lineage.digest import check_seal, is_sealed, read_digest
from mlm_repro.lineage.errors import UserError
from mlm_repro.lineage.files import Manifest, parse_document, read_document, read_object
from mlm_repro.lineage.numbers import exact, show
from mlm_repro.lineage.progress import format_duration
from mlm_repro.lineage.run import MANIFEST, RunDirectory
from mlm_repro.reports import tables
from mlm_repro.reports.exhibit import Exhibit, Table
from mlm_repro.reports.figures import Layer, Panel, Point
from mlm_repro.reports.page import shell
from mlm_repro.reports.render import render_all
from mlm_repro.reports.reproduced import evaluations_exhibit, ledger_exhibit
from mlm_repro.reports.style import template_environment

SHOWN = 400
"""Largest number of points in a curve of a training's page."""
LISTED = 100
"""Largest number of iterations in the table of a training's page."""
CURVES: dict[str, tuple[str, str, str]] = tables.AXES["curves"]
"""Id of the exhibit, title and axis label of the curves beside the loss, by the Step's field that
each one draws."""
TRAINED = ("iteration", "samples", "loss", *CURVES)
VALIDATED = ("iteration", "samples", "loss", "perplexity")
"""Fields of a Validation that are the columns of its table, as `TRAINED` are a Step's."""


@dataclass(frozen=True)
class Training:
    """A training run as far as it has come: its manifest, metrics, datasets, evaluation results and
    generated texts."""

    path: Path
    manifest: Manifest
    size: tuple[int, int]
    """Pair: the number of the model's parameters, and the number of tokens of the whole
    training."""
    summary: TrainingSummary | None
    """Content of the training's summary.json; None if the training is unfinished."""
    steps: Sequence[Step]
    validations: Sequence[Validation]
    datasets: Sequence[TrainedOn]
    ledger: Ledger | None
    card: DataCard | None
    evaluations: dict[str, Result]
    """Results of its checkpoints by the stem of the JSON file beside the run, with the task behind
    a hyphen if the file has several."""
    samples: Sequence[JSON]
    """Prompts with the continuations that its checkpoints generated, as `mlm-eval` wrote them."""
    state: str
    """Words on the state of the run, unfinished, or complete and unchanged with its digest."""
    note: str
    """Sentence on the datasets that are not shown; empty if there are none."""

    @property
    def exhibits(self) -> dict[str, Exhibit]:
        """A dict of the page's exhibits by name: the curves if an iteration is recorded, the
        evaluations and the data's ledger if there are any."""
        return {exhibit.name: exhibit for exhibit in self._exhibits()}

    def _exhibits(self) -> Iterator[Exhibit]:
        if self.steps:
            curves = [binned("training", self.steps, "loss")]
            points = tuple(
                Point(validation.iteration, validation.loss) for validation in self.validations
            )
            if points:
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
        """A list of the page's tables: one of at most 100 iterations, evenly spread and with the
        last, and one of validations; a table without rows is left out."""
        # Counted from the end, so that the last iteration is always shown.
        shown = self.steps[:: -(len(self.steps) // LISTED + 1)][::-1]
        title = f"{len(shown)} of {len(self.steps)} recorded iterations"
        tables_of = ((title, TRAINED, shown), ("Validations", VALIDATED, self.validations))
        return [
            Table(
                names, [[exact(getattr(line, name)) for name in names] for line in lines], 0, name
            )
            for name, names, lines in tables_of
            if lines
        ]


def binned(name: str, steps: Sequence[Step], key: str) -> Layer:
    """Return the Layer called `name`, a curve over iterations of the steps' field `key`, with at
    most `SHOWN` points; if there are more steps, each point is the mean of a block, with minimum
    and maximum, at its last iteration. Steps without a value are left out."""
    valued = [step for step in steps if getattr(step, key) is not None]
    apart = -(-len(valued) // SHOWN) or 1
    points = []
    for start in range(0, len(valued), apart):
        block = valued[start : start + apart]
        points.append(Point.mean(block[-1].iteration, [getattr(step, key) for step in block]))
    return Layer(name, 0, "measured", tuple(points))


def _curve(name: str, title: str, label: str, curves: list[Layer]) -> Exhibit:
    ends = "; ".join(f"{curve.series} {show(curve.final)}" for curve in curves)
    caption = [f"At the end: {ends}."]
    if curves[0].repeats > 1:
        caption.append(
            f"Points are means of {curves[0].repeats} iterations, the band their least and"
            " greatest."
        )
    return Exhibit(
        name,
        title,
        caption,
        Table((), ()),
        "",
        [Panel(curves, "iteration", label)],
        f"Line chart of {label} over iterations. {caption[0]}",
        column=True,
    )


def load_training(run: Path) -> Training:
    """Return the Training that the directory `run` holds, finished or not, with its dataset if that
    is here, and the results that `mlm-eval` wrote into the folder around it.

    Raises BadInput if the directory holds no training, IntegrityFailure if a file is damaged or the
    run was changed after it was sealed.
    """
    directory = RunDirectory.open(run, "training").path
    manifest = read_document(directory / MANIFEST, Manifest)
    config = read_config(manifest.model_dump(), directory / MANIFEST)
    state = "unfinished: it was stopped, failed or is at work"
    if is_sealed(directory):
        state = f"complete and unchanged, digest {check_seal(directory)[:16]}"
    path = directory / SUMMARY
    summary = read_document(path, TrainingSummary) if path.is_file() else None
    ledger = card = None
    datasets = named_datasets(directory)
    note = ""
    if datasets:
        data = max(datasets, key=lambda each: each.weight)
        if not data.is_here:
            note = f"The dataset {data.place} is not here, or was built anew since."
        else:
            if len(datasets) > 1:
                note = f"Of {len(datasets)} datasets this is the one of the largest share."
            if (data.place / LEDGER).is_file():  # a dataset that this suite did not build has none
                ledger = read_document(data.place / LEDGER, Ledger)
            card = read_document(data.place / DATASET, DataCard)
    evaluations, samples = _scored(directory)
    return Training(
        directory,
        manifest,
        (parameter_count(config.model), tokens_trained(config.model, config.train)),
        summary,
        read_steps(directory),
        read_validations(directory),
        datasets,
        ledger,
        card,
        evaluations,
        samples,
        state,
        note,
    )


def _scored(run: Path) -> tuple[dict[str, Result], list[JSON]]:
    """Return a pair from the JSON files of `mlm-eval` in the folder around the directory `run`: a
    dict of the Results of the run's checkpoints by file stem, with `-TASK` behind it if a file has
    several, and a list of their generated texts. Other files there are passed over. Raises
    IntegrityFailure for a damaged result."""
    digests = {read_digest(checkpoint) for checkpoint in complete_checkpoints(run)}
    evaluations = {}
    samples = []
    for path in sorted(run.parent.glob("*.json")):
        values: JSON = {}
        # Other files than `mlm-eval`'s may lie beside the run.
        with suppress(UserError):
            values = read_object(path)
        several = values.get("results")
        for task, result in (several if isinstance(several, dict) else {"": values}).items():
            if not isinstance(result, dict) or result.get("checkpoint_digest") not in digests:
                continue
            if "continuation" in result:
                samples.append(result)
            else:
                name = f"{path.stem}-{task}" if task else path.stem
                evaluations[name] = parse_document(result, Result, str(path))
    return evaluations, samples


def render_training(training: Training) -> str:
    """Return the HTML of a training's page as one text, which refers to nothing outside itself. Its
    figures are drawn, with a line of progress."""
    exhibits = training.exhibits
    context = {
        "run": training,
        "exhibits": exhibits,
        "drawings": render_all(exhibits.values()),
        "alone": True,
        "card": training.card,
        "ledger": training.ledger,
        "note": training.note,
        "ours": "measured",
        "tables": tables,
        "curves": [exhibit for exhibit in exhibits.values() if exhibit.column],
        "duration": format_duration,
    }
    return template_environment().get_template("run.html").render(shell() | context)
