"""A page of one training, with curves, numbers, generated text, evaluations and data, or of several
over each other, in one file to send."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import fmean

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
    read_steps,
    read_summary,
    read_validations,
)
from mlm_repro.engine.run.resolved import read_config
from mlm_repro.engine.run.scores import SCORES
from mlm_repro.evaluation.schema import Result
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.chain import complete_checkpoints, iteration_of
from mlm_repro.lineage.config import flatten
from mlm_repro.lineage.digest import check_seal, read_digest
from mlm_repro.lineage.errors import BadInput, UserError
from mlm_repro.lineage.files import Manifest, parse_document, read_document, read_object
from mlm_repro.lineage.numbers import exact
from mlm_repro.lineage.progress import format_duration
from mlm_repro.lineage.run import MANIFEST, RunDirectory
from mlm_repro.reports import tables
from mlm_repro.reports.exhibit import Exhibit, Table
from mlm_repro.reports.figures import Layer, Panel, Point
from mlm_repro.reports.page import shell
from mlm_repro.reports.render import render_all
from mlm_repro.reports.reproduced import ends_of, evaluations_exhibit, ledger_exhibit
from mlm_repro.reports.style import template_environment

SHOWN = 400
"""Largest number of points in a curve of a training's page."""
CURVES: dict[str, tuple[str, str, str]] = tables.AXES["curves"]
"""Key of a curve → its id, title and axis label. The score of a protocol is its own title and
label."""
MEASURES = "accuracy", "perplexity"
"""Keys of the numbers in a result of `mlm-eval` that are drawn over iterations."""

Curves = dict[str, dict[int, float]]
"""Key of a curve, one of `CURVES` or a score such as `lambada accuracy` → iteration → number."""


class Training:
    """Training run as far as it has come: its manifest, metrics, datasets, evaluation results and
    generated texts."""

    def __init__(self, run: Path) -> None:
        """Read a training run, finished or not, from its directory. Read also the dataset with the
        largest share in the training, and the results of `mlm-eval` in the run's parent folder. If
        that dataset is not on this machine or has changed, `ledger` and `card` are None; `ledger`
        is also None for a dataset that has none.

        Raises BadInput if the directory holds no training or its manifest has a setting that this
        program refuses, IntegrityFailure if a file is damaged or the run was changed after it was
        sealed, DataMissing if the manifest does not name its datasets.
        """
        directory = RunDirectory.open(run, "training")
        self.path = path = directory.path
        self.manifest = read_document(path / MANIFEST, Manifest)
        config = read_config(directory)
        values = config.model_dump(mode="json", exclude={"name"})
        self.settings = flatten({**values, "made of": self.manifest.parents})
        """Dict dotted key → value of the configuration, without the name, and of the digests of the
        run's inputs."""
        self.digest = check_seal(path) if directory.is_complete else ""
        """Digest of the run; empty if it is unfinished."""
        self.size = parameter_count(config.model), tokens_trained(config.model, config.train)
        """Number of the model's parameters, and number of tokens of the whole training."""
        self.summary = read_summary(path) if (path / SUMMARY).is_file() else None
        """Summary of the training, from its file; None if the training is unfinished."""
        self.steps = read_steps(path)
        # The last validation, of the whole split, may come after another at its iteration.
        self.validations = list({line.iteration: line for line in read_validations(path)}.values())
        self.datasets = named_datasets(path)
        self.ledger: Ledger | None = None
        self.card: DataCard | None = None
        self.data = max(self.datasets, key=lambda each: each.weight, default=None)
        """The dataset that the ledger and the card are of; None if the run names none."""
        if self.data and self.data.is_here:
            place = self.data.place
            if (place / LEDGER).is_file():  # a dataset that this suite did not build has none
                self.ledger = read_document(place / LEDGER, Ledger)
            self.card = read_document(place / DATASET, DataCard)
        self.evaluations, self.samples = _scored(path)
        """Results of its checkpoints by the stem of the file beside the run, with the task if the
        file has several; prompts with the continuations that its checkpoints generated."""

    @cached_property
    def curves(self) -> Curves:
        """The run's curves, a dict key → iteration → number: under the keys of `CURVES` quantities
        of its iterations, under `validation` losses of its validations, and under keys such as
        `lambada accuracy` the scores of its checkpoints that its directory has. A curve of `CURVES`
        may be empty. Raises IntegrityFailure if a file of such scores cannot be read."""
        curves: Curves = defaultdict(dict, {key: {} for key in CURVES})
        for line in self.validations:
            curves["validation"][line.iteration] = line.loss
        for step in self.steps:
            for key in CURVES:
                if (value := getattr(step, key, None)) is not None:
                    curves[key][step.iteration] = value
        for path in sorted((self.path / SCORES).glob("*/*.json")):
            result = read_object(path)
            for key in MEASURES:
                if result.get(key) is not None:
                    curves[f"{path.stem} {key}"][iteration_of(path.parent)] = result[key]
        return curves


class Trainings:
    """One training or several on one page, read from their directories. `exhibits` has their
    curves, drawn over each other, and the evaluations of the first training and the ledger of its
    data. Runs whose settings differ in the seed alone share a line, their mean."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read the trainings in the directories `paths`, one or several, into the attribute `runs`,
        a list of a Training for each, in this order. Raises BadInput if two paths lead to the same
        run, and the errors of `Training`."""
        self.runs = [Training(path) for path in paths]
        places = [run.path for run in self.runs]
        for place in places:
            if places.count(place) > 1:
                raise BadInput(f"{place} is named twice: name each run once")

    @property
    def lines(self) -> list[tuple[str, list[Training]]]:
        """List of pairs: the name of a line in the page's charts, and a list of the Trainings whose
        mean the line is. Each run is a line, but runs whose settings differ in the seed alone share
        one. A line is named by its first run's directory; then, if the runs of the page differ in
        one setting alone besides the seed, by that setting and its value; then by the number of
        seeds if there are several."""
        alike = defaultdict(list)
        for run in self.runs:
            alike[str(run.settings | {"train.seed": None})].append(run)
        apart = [
            key
            for key in self.runs[0].settings
            if key != "train.seed" and len({str(run.settings.get(key)) for run in self.runs}) > 1
        ]
        lines = []
        for runs in alike.values():
            words = [runs[0].path.name]
            if len(apart) == 1:
                words.append(f"{apart[0].rpartition('.')[2]} {runs[0].settings[apart[0]]}")
            if len(runs) > 1:
                words.append(f"mean of {len(runs)} seeds")
            lines.append((", ".join(words), runs))
        return lines

    @property
    def exhibits(self) -> dict[str, Exhibit]:
        """Dict name → Exhibit of the page: the curves that have a point, and the first run's
        evaluations and ledger of its data, if there are any."""
        exhibits = list(self._curves())
        run = self.runs[0]
        if run.evaluations:
            exhibits.append(evaluations_exhibit(run.evaluations, []))
        if run.ledger:
            exhibits.append(ledger_exhibit(run.ledger))
        return {exhibit.name: exhibit for exhibit in exhibits}

    def _curves(self) -> Iterator[Exhibit]:
        """Yield an Exhibit, a line chart over iterations, for each curve of the runs that has a
        point, such as the loss, the validations or a score. It draws each line of the property
        `lines`: a run, or the mean of runs that differ in the seed alone, with a band from their
        least to their greatest. If the page has one line, the loss's chart has the validations
        too."""
        lines = self.lines
        for key in dict.fromkeys(chain.from_iterable(run.curves for run in self.runs)):
            name, title, label = CURVES.get(key, (key.replace(" ", "-"), key, key))
            drawn = {label: key}
            if len(lines) == 1 and key == "loss":
                drawn = {"training": key, "validation": "validation"}
            layers = list[Layer]()
            for series, part in drawn.items():
                for rank, (line, runs) in enumerate(lines, len(layers)):
                    curves = [run.curves[part] for run in runs]
                    if points := _points(curves, len(self.runs) > 1):
                        layers.append(
                            Layer(
                                line if len(lines) > 1 else series, rank, "measured", tuple(points)
                            )
                        )
            if layers:
                sentence = ends_of(layers)
                if len(self.runs) > len(lines):
                    sentence += " A band is from the least to the greatest of the seeds."
                yield Exhibit(
                    name,
                    title,
                    [sentence],
                    Table((), ()),
                    "",
                    [Panel(layers, "iteration", label)],
                    f"Line chart of {label} over iterations. {sentence}",
                    column=True,
                )


def _points(curves: Sequence[dict[int, float]], of_runs: bool) -> list[Point]:
    """Return a list of at most `SHOWN` Points over the iterations at which all curves have a
    number; `curves`, at least one, are dicts iteration → number. Each Point is the mean of all
    curves over a block of these iterations, at the block's last one; blocks have one iteration
    unless there are more than `SHOWN`. Several numbers give an interval, from the least to the
    greatest in the block or, if `of_runs`, of the curves' means over it."""
    shared = sorted(set(curves[0]).intersection(*curves))
    apart = -(-len(shared) // SHOWN) or 1
    points = []
    for start in range(0, len(shared), apart):
        block = shared[start : start + apart]
        values: list[float] = []
        for curve in curves:
            of_block = [curve[number] for number in block]
            values += [fmean(of_block)] if of_runs else of_block
        points.append(Point.mean(block[-1], values))
    return points


def _scored(run: Path) -> tuple[dict[str, Result], list[JSON]]:
    """Return a pair, read from the JSON files of `mlm-eval` in the parent folder of the directory
    `run`: a dict name → Result of the run's checkpoints, and a list of their generated texts, each
    a dict. A name is the file's stem or, for each result of a file that has results by task,
    `STEM-TASK`. Other and unreadable files there are passed over, and so are results of checkpoints
    that the run has no more. Raises IntegrityFailure for a result that does not fit the schema, or
    if a checkpoint's seal cannot be read."""
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


def render_trainings(trainings: Trainings) -> str:
    """Return the HTML of a page of trainings as one text, which refers to nothing outside itself.
    Figures are drawn, with a line of progress on standard error."""
    exhibits = trainings.exhibits
    context = {
        "page": trainings,
        "exhibits": exhibits,
        "drawings": render_all(exhibits.values()),
        "tables": tables,
        "duration": format_duration,
        "exact": exact,
    }
    return template_environment().get_template("run.html").render(shell() | context)
