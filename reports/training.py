"""A page of one training: its curves, numbers, generated text, evaluations and data, in one file to
send."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from mlm_repro.data_pipeline.files import (
    DATASET,
    LEDGER,
    DataCard,
    Ledger,
    named_datasets,
)
from mlm_repro.engine.costs import parameter_count, tokens_trained
from mlm_repro.engine.run.files import (
    SUMMARY,
    Step,
    read_steps,
    read_summary,
    read_validations,
)
from mlm_repro.engine.run.resolved import read_config
from mlm_repro.engine.run.scores import SCORES
from mlm_repro.evaluation.schema import Result
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.chain import complete_checkpoints, iteration_of
from mlm_repro.lineage.digest import check_seal, read_digest
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
"""Largest number of iterations in the page's table of iterations."""
CURVES: dict[str, tuple[str, str, str]] = tables.AXES["curves"]
"""Key of a value in the metrics → id, title and axis label of its curve, of the curves beside the
loss."""
TRAINED = ("iteration", "samples", "loss", *CURVES)
VALIDATED = ("iteration", "samples", "loss", "perplexity")
"""Fields in the table of iterations, `TRAINED`, and in the table of validations."""
MEASURES = "accuracy", "perplexity"
"""Keys of the numbers in a result of `mlm-eval` that are drawn over iterations."""


class Training:
    """Training run as far as it has come: its manifest, metrics, datasets, evaluation results and
    generated texts."""

    def __init__(self, run: Path) -> None:
        """Read a training run, finished or not, from its directory, the dataset with the largest
        share in it, and the results of `mlm-eval` in the run's parent folder. If that dataset is
        not here, `note` says so, and `ledger` and `card` are None.

        Raises BadInput if the directory holds no training, IntegrityFailure if a file is damaged or
        the run was changed after it was sealed, DataMissing if the manifest does not name its
        datasets.
        """
        directory = RunDirectory.open(run, "training")
        self.path = path = directory.path
        self.manifest = read_document(path / MANIFEST, Manifest)
        config = read_config(directory)
        self.state = "unfinished: it was stopped, failed or is at work"
        if directory.is_complete:
            self.state = f"complete and unchanged, digest {check_seal(path)[:16]}"
        self.size = parameter_count(config.model), tokens_trained(config.model, config.train)
        """Number of the model's parameters, and number of tokens of the whole training."""
        self.summary = read_summary(path) if (path / SUMMARY).is_file() else None
        """Summary of the training, from its file; None if the training is unfinished."""
        self.steps = read_steps(path)
        self.validations = read_validations(path)
        self.datasets = named_datasets(path)
        self.ledger: Ledger | None = None
        self.card: DataCard | None = None
        self.note = ""
        """Sentence on the datasets that are not shown; empty if there are none."""
        data = max(self.datasets, key=lambda each: each.weight, default=None)
        if data and not data.is_here:
            self.note = f"The dataset {data.place} is not here, or was built anew since."
        elif data:
            if len(self.datasets) > 1:
                self.note = (
                    f"Of {len(self.datasets)} datasets this is the one of the largest share."
                )
            if (data.place / LEDGER).is_file():  # a dataset that this suite did not build has none
                self.ledger = read_document(data.place / LEDGER, Ledger)
            self.card = read_document(data.place / DATASET, DataCard)
        self.evaluations, self.samples = _scored(path)
        """Results of its checkpoints by the stem of the file beside the run, with the task if the
        file has several; prompts with the continuations that its checkpoints generated."""

    @property
    def exhibits(self) -> dict[str, Exhibit]:
        """Dict name → Exhibit of the page: the training's curves if an iteration is recorded, a
        curve for each score of its checkpoints that the run's directory has, and the evaluations
        and the data's ledger if there are any. The scores are read at each access."""
        return {exhibit.name: exhibit for exhibit in self._exhibits()}

    def _exhibits(self) -> Iterator[Exhibit]:
        if self.steps:
            curves = [binned("training", self.steps, "loss")]
            if self.validations:
                points = [Point(line.iteration, line.loss) for line in self.validations]
                curves.append(Layer("validation", 2, "measured", tuple(points)))
            yield _curve("loss", "Loss", "loss (nats)", curves)
            for key, (name, title, label) in CURVES.items():
                if (curve := binned(label, self.steps, key)).points:
                    yield _curve(name, title, label, [curve])
        for name, points in _scores(self.path).items():
            curve = Layer(name, 0, "measured", tuple(points))
            yield _curve(name.replace(" ", "-"), name, name, [curve])
        if self.evaluations:
            yield evaluations_exhibit(self.evaluations, [])
        if self.ledger:
            yield ledger_exhibit(self.ledger)

    @property
    def listed(self) -> list[Table]:
        """List of the page's Tables: one of at most 100 iterations, evenly spread and with the
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
    """Return a curve, as a Layer named `name`, over iterations of the steps' field `key`, with at
    most `SHOWN` points; if there are more steps, each point is the mean of a block, with minimum
    and maximum, at its last iteration. Steps without a value are left out."""
    valued = [step for step in steps if getattr(step, key) is not None]
    apart = -(-len(valued) // SHOWN) or 1
    blocks = [valued[start : start + apart] for start in range(0, len(valued), apart)]
    points = [
        Point.mean(block[-1].iteration, [getattr(step, key) for step in block]) for block in blocks
    ]
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


def _scores(run: Path) -> dict[str, list[Point]]:
    """Return a dict protocol and number, such as `lambada accuracy` → list of Points over
    iterations, from the files that a run's directory has of the scores of its checkpoints; empty
    without such files. Raises IntegrityFailure if one cannot be read."""
    curves: dict[str, list[Point]] = defaultdict(list)
    for path in sorted((run / SCORES).glob("*/*.json")):
        result = read_object(path)
        for name in MEASURES:
            if result.get(name) is not None:
                point = Point(iteration_of(path.parent), result[name])
                curves[f"{path.stem} {name}"].append(point)
    return curves


def _scored(run: Path) -> tuple[dict[str, Result], list[JSON]]:
    """Return a pair: a dict file stem → Result of the run's checkpoints, with the task behind the
    stem if a file has several, and a list of their generated texts, each a dict. They come from the
    JSON files of `mlm-eval` in the run's parent folder. Other files there are passed over, and so
    are results of checkpoints that the run has no more. Raises IntegrityFailure for a damaged
    result."""
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
    """Return the HTML of a training's page as one text, which refers to nothing outside itself.
    Figures are drawn, with a line of progress on standard error."""
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
