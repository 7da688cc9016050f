"""Names and schemas of the files that experiments write. Imports no torch."""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import Field, model_validator

from mlm_repro.engine.run.files import METRICS, SUMMARY, read_metrics
from mlm_repro.lineage.atomic import JSON, json_bytes
from mlm_repro.lineage.digest import MARKER, checked_marker
from mlm_repro.lineage.errors import IntegrityFailure
from mlm_repro.lineage.files import (
    FileSchema,
    Finite,
    Manifest,
    Positive,
    read_lines,
    read_object,
    write_lines,
)
from mlm_repro.lineage.run import MANIFEST

NOT_RUN = "not_run.json"
FORECAST = "forecast.json"
SWEEPS = "sweeps"
SCORES = "scores.json"
VERDICTS = "verdicts.json"
RUNS = "runs.jsonl"
EVALUATIONS = "evaluations.jsonl"
EXPERIMENTS = "experiments"
"""Kind and name of a study of the runs of several experiments."""
TRAININGS_APART = "training"
"""Name of the folder of a study in which the first release kept trainings."""
FORMER_EVALUATIONS = "evaluations"
"""Name of the folder of a reproduction in which the first release kept evaluations."""
EVALUATIONS_APART = ".evaluations"
"""Name of the hidden folder of a reproduction in which new evaluations wait until
`join_evaluations`."""
STAND_IN = "a stand-in for the released weights"
PARTIAL = "partial"
"""First words of a record's note if other weights were scored, or only a part of the test."""
SMOOTHING = 0.9
"""Decay of the moving average of a sweep's losses."""
DIVERGED = 1.1
"""Multiple of the first loss above which a sweep counts as diverged."""
FITTED = "fitted on this row"
"""Note on a simulated number whose constants were fitted on it."""
HELD_OUT = "held out of the fit"
"""Note on a simulated number that no constant was fitted on."""


class KeptRun(FileSchema, extra="forbid"):
    """A line of runs.jsonl, the parts of a run that a study keeps, as JSON values: its `name`,
    `manifest`, completion marker (`seal`) and `summary`, the list `metrics`, and what only earlier
    versions wrote, `refused` and `timeline`. A part that the run lacks is None, for `metrics` an
    empty list."""

    name: str
    """Name of the run in the study, of its directory or, in a reproduction, of the model."""
    manifest: JSON | None = None
    seal: JSON | None = None
    """Completion marker of the run; None for a training whose loss stopped being a number, and for
    one that the first release kept."""
    summary: JSON | None = None
    metrics: list[JSON] = Field(default_factory=list)
    """A training's metrics: its validations and, in a reproduction, means over blocks of
    iterations."""
    refused: list[JSON] | None = None
    """Content of not_run.json, which only earlier versions wrote: the rows that could not run, with
    reasons; None without that file."""
    timeline: JSON | None = None
    """Content of timeline.json, which only the first release wrote: when each microbatch of one
    iteration was computed."""

    @classmethod
    def of(cls, run: Path, **more: Any) -> Self:
        """Return a KeptRun, a line of runs.jsonl, from a run's directory: its name and the values
        of its manifest, completion marker and summary, as far as these files exist. `more` sets
        further fields, or replaces these. Raises IntegrityFailure if one of the files cannot be
        read."""
        files = {"manifest": MANIFEST, "seal": MARKER, "summary": SUMMARY}
        here = {
            field: read_object(run / file)
            for field, file in files.items()
            if (run / file).is_file()
        }
        return cls(**{"name": run.name, **here, **more})

    def check_seal(self, others: Mapping[str, bytes] | None = None) -> None:
        """Check that this line's manifest, summary and refused rows, as files, and `others` (bytes
        by file name) are those of its completion marker; the metrics are not checked. No file is
        read.

        Raises IntegrityFailure if a file differs from the sealed content, or if the marker was
        edited. Without a marker nothing is checked.
        """
        if self.seal is None:
            return
        seal = checked_marker(lambda: self.seal, self.name)
        values = {MANIFEST: self.manifest, SUMMARY: self.summary, NOT_RUN: self.refused}
        contents = {
            name: None if value is None else json_bytes(value) for name, value in values.items()
        }
        for name, content in {**contents, **(others or {})}.items():
            sealed = seal["files"].get(name, {}).get("sha256")
            if sealed != (None if content is None else sha256(content).hexdigest()):
                raise IntegrityFailure(
                    f"{self.name}: its {name} is not the one that was sealed: the copy that the"
                    " study keeps was changed, so restore the study's files"
                )


def read_runs(study: Path) -> dict[str, KeptRun]:
    """Return a dict by name of the KeptRuns that the study in the directory `study` keeps; empty if
    it keeps no runs yet.

    Without runs.jsonl, the first release's folder of trainings is read. Raises IntegrityFailure if
    a line is damaged or two lines have one name.
    """
    if (study / RUNS).is_file():
        lines = read_lines(study / RUNS, KeptRun)
    else:
        folders = (path.parent for path in sorted((study / TRAININGS_APART).glob(f"*/{METRICS}")))
        lines = [KeptRun.of(folder, metrics=read_metrics(folder)) for folder in folders]
    return _by_name(lines, study)


def write_runs(study: Path, runs: Iterable[KeptRun]) -> None:
    """Write the runs to runs.jsonl in the directory `study`, sorted by name; a file that is there
    is replaced, and its runs with it."""
    write_lines(study / RUNS, sorted(runs, key=attrgetter("name")))


class KeptEvaluation(FileSchema, extra="forbid"):
    """A line of evaluations.jsonl of a reproduction, about one evaluation: in `name` the names of
    its model and protocol with a hyphen between them, and in `result` the JSON object that
    `mlm-eval --json` wrote for it."""

    name: str
    """Names of the model and the protocol, with a hyphen between them."""
    result: JSON


def read_evaluations(study: Path) -> dict[str, JSON]:
    """Return a dict of the results, JSON objects, of the reproduction in the directory `study`, by
    a key of model and protocol with a hyphen between them: the results in evaluations.jsonl and the
    results that still lie in folders. A result in a folder replaces the one in evaluations.jsonl.

    Raises IntegrityFailure for a damaged file, or for two results of one name in evaluations.jsonl.
    """
    path = study / EVALUATIONS
    lines = read_lines(path, KeptEvaluation) if path.is_file() else []
    results = {name: line.result for name, line in _by_name(lines, study).items()}
    for folder in (study / FORMER_EVALUATIONS, study / EVALUATIONS_APART):
        results |= {path.stem: read_object(path) for path in sorted(folder.glob("*.json"))}
    return results


NamedT = TypeVar("NamedT", "KeptRun", "KeptEvaluation")


def _by_name(lines: Sequence[NamedT], study: Path) -> dict[str, NamedT]:
    """Return `lines`, read from runs.jsonl or evaluations.jsonl, as a dict by name. Raises
    IntegrityFailure, which names the directory `study`, if two have the same name."""
    named = {line.name: line for line in lines}
    if len(named) < len(lines):
        raise IntegrityFailure(
            f"{study}: the {len(lines)} lines of its runs.jsonl or evaluations.jsonl have only"
            f" {len(named)} names: a line was copied, so remove one of the two"
        )
    return named


def join_evaluations(study: Path) -> None:
    """Write all results of the reproduction in the directory `study`, also those in its folders of
    single results, into its evaluations.jsonl, sorted by name, then delete these folders.
    A result in a folder replaces the line of the same name. Raises IntegrityFailure for a damaged
    result, and then nothing is changed."""
    results = sorted(read_evaluations(study).items())
    write_lines(
        study / EVALUATIONS, (KeptEvaluation(name=name, result=result) for name, result in results)
    )
    for name in (FORMER_EVALUATIONS, EVALUATIONS_APART):
        shutil.rmtree(study / name, ignore_errors=True)


class RateSweep(FileSchema):
    """Content of sweeps/ARM.json of an ablation: the learning rate and the loss of each iteration
    of a training whose rate rises exponentially."""

    rates: list[Positive]
    losses: list[Finite]

    @property
    def lowest_rate(self) -> float | None:
        """The learning rate at the lowest smoothed loss before divergence; None if that loss was
        lowest at its start or there is no loss."""
        average = 0.0
        smoothed = []
        for count, loss in enumerate(self.losses, 1):
            average = SMOOTHING * average + (1 - SMOOTHING) * loss
            smoothed.append(average / (1 - SMOOTHING**count))  # without the bias of the start
            if smoothed[-1] > DIVERGED * self.losses[0]:
                break
        lowest = smoothed.index(min(smoothed)) if smoothed else 0
        return self.rates[lowest] if lowest else None


class Comparison(FileSchema):
    """Difference in bits per byte between two models on the same articles of a text, the larger
    model's minus the smaller's, with its 90 % interval."""

    text: str
    smaller: int
    """Index of the smaller model; `larger` is the larger model's index."""
    larger: int
    difference: Finite
    """Difference in bits per byte: the larger model's minus the smaller's."""
    low: Finite
    """Lower end of the 90 % interval; `high` is the upper end."""
    high: Finite

    def sentence(self, names: Sequence[str]) -> str:
        """Return a sentence, without a full stop, on how many bits per byte more or fewer the
        larger model takes than the smaller, with the ends of the 90 % interval and, if zero lies in
        it, a remark. `names[index]` is the name of the model with this index."""
        least = -self.high
        size = -self.difference
        most = -self.low
        how = "fewer"
        if self.difference > 0:
            least = self.low
            size = self.difference
            most = self.high
            how = "more"
        return (
            f"On {self.text} {names[self.larger]} takes {size:.3f} bits per byte {how} than"
            f" {names[self.smaller]} (90 %: {least:.3f} to {most:.3f})"
            + ("; the interval has zero in it" if least <= 0 <= most else "")
        )


class TextScore(FileSchema):
    """A model's bits per byte on a text, and for each article of the text its loss, in nats summed
    over its tokens, and its number of words."""

    bits_per_byte: Finite
    nll: list[Finite]
    """Negative log-likelihood of each article in nats, summed over its tokens."""
    words: list[Finite]
    """Words of each article. An article that was scored in part counts the same share of its
    words."""


class ReproductionScores(FileSchema):
    """scores.json of a reproduction: the names of its models, smallest first, and a Comparison,
    the paired difference on the same text, of each two that are neighbours in size, over `articles`
    articles and `seeds` trainings of each model. A text of a single article gives no Comparison."""

    text: str
    """Name of the protocol by which the text was scored."""
    articles: int
    seeds: int
    models: list[str]
    """Names of the models, smallest first."""
    comparisons: list[Comparison]
    """Comparisons of the models that are neighbours in size."""

    @model_validator(mode="after")
    def _is_of_its_models(self) -> Self:
        if not all(
            0 <= comparison.smaller < comparison.larger < len(self.models)
            for comparison in self.comparisons
        ):
            raise ValueError(
                "`smaller` and `larger` of a comparison must be indices of `models`, in this order"
            )
        return self

    @property
    def quantity(self) -> str:
        """The name of the quantity whose records hold the bits per byte of each model and seed: the
        attribute `text` without an ending `-perplexity`, then `_bits_per_byte`, such as
        `wikitext103_bits_per_byte`."""
        return f"{self.text.removesuffix('-perplexity')}_bits_per_byte"

    def sentences(self, labels: Mapping[str, str]) -> list[str]:
        """Return a list of a sentence for each of this object's `comparisons`, in order, and, last,
        one on the numbers of articles and seeds that their intervals are over; an empty list
        without comparisons. `labels` is a dict model's name → name to show; a model that it lacks
        keeps its own name."""
        if not self.comparisons:
            return []
        names = [labels.get(name, name) for name in self.models]
        seeds = f" and {self.seeds} seeds" if self.seeds > 1 else ""
        return [
            *(f"{comparison.sentence(names)}." for comparison in self.comparisons),
            f"Intervals are over {self.articles:,} articles{seeds}.",
        ]


class EffectForecast(FileSchema):
    """forecast.json of an ablation: the ablation with the effects that are judged, its datasets and
    learning rates. It is written after the trials of learning rates and before the trainings that
    are judged, whose seeds are words of its SHA-256."""

    experiment: str
    ablation: JSON
    """The ablation of experiment.toml at that time: arms, effects, length, number of seeds,
    analysis."""
    datasets: list[str]
    """Digest of each dataset, in the order in which they were given."""
    bits_per_nat: list[Finite]
    """Bits per byte for each nat per token, for the validation text of each dataset; 0 if its card
    does not say."""
    bigram_nats: list[Finite] = Field(default_factory=list)
    """Loss of bigrams counted in each dataset's training text, in nats per token of its validation
    text; empty in forecasts of earlier versions."""
    rates: dict[str, Positive]
    """Learning rate of each arm, by the arm's name."""
    searched: dict[str, str]
    """Digests of the trial trainings by name; empty for a trial that diverged."""

    @property
    def made_of(self) -> dict[str, str]:
        """A dict by name of the digests of the trials of learning rates that did not diverge."""
        return {trial: digest for trial, digest in self.searched.items() if digest}


class VerdictScore(FileSchema):
    """The document verdicts.json, which a clone's `python -m tests.mutation` writes. Its field
    `sentence` is a text that says how many verdicts could have failed."""

    sentence: str
    """Sentence on how many verdicts could have failed."""


def origin_of(manifest: Manifest) -> JSON:
    """Return a dict of the two fields of a record that name its run, from the run's manifest:
    `source`, its name with the first eight characters of its identity, NAME-IDENTITY, and `digest`,
    the digest of its configuration."""
    return {"source": f"{manifest.name}-{manifest.identity[:8]}", "digest": manifest.config_digest}
