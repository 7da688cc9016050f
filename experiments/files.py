"""Names and schemas of the files that experiments write. Imports no torch."""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import Field, model_validator

from mlm_repro.engine.run.files import METRICS, SUMMARY, read_metrics
from mlm_repro.lineage.atomic import JSON, json_bytes
from mlm_repro.lineage.digest import MARKER, sha256_json
from mlm_repro.lineage.errors import IntegrityFailure
from mlm_repro.lineage.files import (
    FileSchema,
    Finite,
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
TRAININGS_APART, FORMER_EVALUATIONS, EVALUATIONS_APART = "training", "evaluations", ".evaluations"
"""Folders of a reproduction of the first release in their place, and the hidden one in which
evaluations wait until they are joined."""
STAND_IN = "a stand-in for the released weights"
"""Beginning of the note on a record of other weights, or of a part of the test."""
SMOOTHING, DIVERGED = 0.9, 1.1
"""Decay of the moving average of a sweep's losses, and the share of the first loss above which the
sweep diverged."""
FITTED, HELD_OUT = "fitted on this row", "held out of the fit"
"""Notes on the records of simulated numbers."""


class KeptRun(FileSchema):
    """A line of runs.jsonl: what a study keeps of a run that it was made of."""

    name: str
    """Name of the run in the study."""
    manifest: JSON | None = None
    seal: JSON | None = None
    """Completion marker of the run; None for a training whose loss stopped being a number."""
    summary: JSON | None = None
    metrics: list[JSON] = Field(default_factory=list)
    """Lines of the metrics of a training: its validations, of a reproduction also means of its
    iterations."""
    refused: list[JSON] | None = None
    """not_run.json of a run of an experiment."""
    timeline: JSON | None = None
    """timeline.json, which trainings of the first release have: when each microbatch was computed
    in one iteration."""

    @classmethod
    def of(cls, run: Path, **more: Any) -> Self:
        """The line of any run: its manifest, its completion marker and its summary, as far as it
        has them."""
        files = {"manifest": MANIFEST, "seal": MARKER, "summary": SUMMARY}
        here = {
            field: read_object(run / file)
            for field, file in files.items()
            if (run / file).is_file()
        }
        return cls(**{"name": run.name, **here, **more})

    def check_seal(self, others: Mapping[str, bytes] | None = None) -> None:
        """Compare manifest, summary and the content of `others`, by file, with the completion
        marker.

        Raises IntegrityFailure for one that is not what was sealed. Without a marker nothing is
        compared.
        """
        if self.seal is None:
            return
        values = {MANIFEST: self.manifest, SUMMARY: self.summary, NOT_RUN: self.refused}
        contents = {
            name: None if value is None else json_bytes(value) for name, value in values.items()
        }
        for name, content in {**contents, **(others or {})}.items():
            sealed = self.seal["files"].get(name, {}).get("sha256")
            if sealed != (None if content is None else sha256(content).hexdigest()):
                raise IntegrityFailure(f"{self.name}: its {name} is not the one that was sealed")
        if sha256_json(self.seal["files"]) != self.seal["digest"]:
            raise IntegrityFailure(
                f"{self.name}: the digest of its seal is not that of the files in it"
            )


def read_runs(study: Path) -> dict[str, KeptRun]:
    """The runs that a study keeps, by name; empty before it keeps one.

    Raises IntegrityFailure for a damaged line.
    """
    if (study / RUNS).is_file():
        lines = read_lines(study / RUNS, KeptRun)
    else:
        folders = (path.parent for path in sorted((study / TRAININGS_APART).glob(f"*/{METRICS}")))
        lines = [KeptRun.of(folder, metrics=read_metrics(folder)) for folder in folders]
    return _by_name(lines)


def write_runs(study: Path, runs: Iterable[KeptRun]) -> None:
    """Keep these runs, in the order of their names."""
    in_order: list[KeptRun] = sorted(runs, key=lambda run: run.name)
    write_lines(study / RUNS, in_order)


class KeptEvaluation(FileSchema):
    """A line of evaluations.jsonl of a reproduction: a file that `mlm-eval --json` wrote."""

    name: str
    """Model and protocol."""
    result: JSON


def read_evaluations(study: Path) -> dict[str, JSON]:
    """The results that a reproduction keeps, by model and protocol, and those that are not joined
    to them yet.

    Raises IntegrityFailure for a damaged file.
    """
    lines = (
        read_lines(study / EVALUATIONS, KeptEvaluation) if (study / EVALUATIONS).is_file() else []
    )
    folders = (study / name for name in (FORMER_EVALUATIONS, EVALUATIONS_APART))
    apart = {
        path.stem: read_object(path) for folder in folders for path in sorted(folder.glob("*.json"))
    }
    return {name: line.result for name, line in _by_name(lines).items()} | apart


NamedT = TypeVar("NamedT", "KeptRun", "KeptEvaluation")


def _by_name(lines: Sequence[NamedT]) -> dict[str, NamedT]:
    """Lines by their names. Raises IntegrityFailure if there are two of one name."""
    named = {line.name: line for line in lines}
    if len(named) < len(lines):
        raise IntegrityFailure(
            f"{len(lines)} lines have {len(named)} names: one of them stands there twice"
        )
    return named


def join_evaluations(study: Path) -> None:
    """Put all results into one file in place of folders of them."""
    results = sorted(read_evaluations(study).items())
    write_lines(
        study / EVALUATIONS, (KeptEvaluation(name=name, result=result) for name, result in results)
    )
    for name in (FORMER_EVALUATIONS, EVALUATIONS_APART):
        shutil.rmtree(study / name, ignore_errors=True)


class RateSweep(FileSchema):
    """sweeps/ARM.json of an ablation: the losses of a training whose rate rises exponentially."""

    rates: list[Positive]
    losses: list[Finite]

    @property
    def lowest_rate(self) -> float | None:
        """Rate of the lowest smoothed loss before that diverges; None if the loss never fell below
        the first."""
        average, smoothed = 0.0, list[float]()
        for count, loss in enumerate(self.losses, 1):
            average = SMOOTHING * average + (1 - SMOOTHING) * loss
            smoothed.append(average / (1 - SMOOTHING**count))  # without the bias of the start
            if smoothed[-1] > DIVERGED * self.losses[0]:
                break
        place = smoothed.index(min(smoothed)) if smoothed else 0
        return self.rates[place] if place else None


class Comparison(FileSchema):
    """Difference in bits per byte between two models on the same articles of a text."""

    text: str
    smaller: int
    """Index of the smaller model; `larger` is that of the larger one."""
    larger: int
    difference: Finite
    """Bits per byte of the larger model minus those of the smaller."""
    low: Finite
    """Lower end of the 90 % interval; `high` is the upper end."""
    high: Finite

    def sentence(self, names: Sequence[str]) -> str:
        """The difference in words, without a full stop. Mentions an interval that contains zero."""
        least, size, most, how = -self.high, -self.difference, -self.low, "fewer"
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
    """A model's score on a text."""

    bits_per_byte: Finite
    nll: list[Finite]
    """Negative log-likelihood of each article in nats, summed over its tokens."""
    words: list[Finite]
    """Words of each article; of a partly scored article the same share of its words."""


class ReproductionScores(FileSchema):
    """scores.json of a reproduction: paired differences between its models on the same text."""

    text: str
    """Protocol of the text."""
    articles: int
    seeds: int
    models: list[str]
    """Names, smallest first."""
    comparisons: list[Comparison]
    """Comparisons of neighbours in size."""

    @model_validator(mode="after")
    def _is_of_its_models(self) -> Self:
        if not all(0 <= each.smaller < each.larger < len(self.models) for each in self.comparisons):
            raise ValueError("a comparison is of no model")
        return self

    @property
    def quantity(self) -> str:
        """Quantity of the records with the bits per byte of each model and seed."""
        return f"{self.text.removesuffix('-perplexity')}_bits_per_byte"

    def sentences(self, labels: Mapping[str, str]) -> list[str]:
        """Each paired difference, under the labels of the models, and what its interval is over."""
        if not self.comparisons:
            return []
        names = [labels.get(name, name) for name in self.models]
        over = f"{self.articles:,} articles" + (
            f" and {self.seeds} seeds" if self.seeds > 1 else ""
        )
        return [
            *(f"{each.sentence(names)}." for each in self.comparisons),
            f"Intervals are over {over}.",
        ]


class EffectForecast(FileSchema):
    """forecast.json of an ablation, written before the trainings whose seeds it gives; it decides
    the verdict."""

    experiment: str
    ablation: JSON
    """The ablation of experiment.toml at that time: arms, effects, length, number of seeds,
    analysis."""
    datasets: list[str]
    """Digests."""
    bits_per_nat: list[Finite]
    """Bits per byte for each nat per token, for the validation text of each dataset; 0 if its card
    does not say."""
    bigram_nats: list[Finite] = Field(default_factory=list)
    """Loss of bigrams counted in each dataset's training text, in nats per token of its validation
    text; empty in forecasts of earlier versions."""
    rates: dict[str, Positive]
    """Learning rate of each arm."""
    searched: dict[str, str]
    """Digests of the trial trainings by name; empty for a trial that diverged."""

    @property
    def made_of(self) -> dict[str, str]:
        """Digests of the trials that did not diverge."""
        return {trial: digest for trial, digest in self.searched.items() if digest}


class VerdictScore(FileSchema):
    """verdicts.json, which a clone's `python -m tests.mutation` writes: which verdicts could have
    failed."""

    sentence: str
    """The score in words."""
