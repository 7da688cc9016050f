"""The published claims and the experiments that answer them, read from the files beside this one. Imports no torch."""

import csv
import math
import operator
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from fnmatch import translate
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from mlm_repro.lineage.config import Config, load_config, parse_config, read_toml
from mlm_repro.lineage.errors import BadInput, cause, did_you_mean

HERE = Path(__file__).parent
CLAIMS = HERE / "claims"
TOLERANCE = re.compile(r"digits|exact|±\d+(\.\d+)?|\d+(\.\d+)?%|-\d+(\.\d+)?\+\d+(\.\d+)?|-\d+(\.\d+)?%\+\d+(\.\d+)?%")

PAPERS: dict[str, str] = read_toml(CLAIMS / "papers.toml")
"""Titles, by what the names of their claims and experiments begin with."""
FACTS: dict[str, list[str]] = read_toml(CLAIMS / "facts.toml")
"""Ids of claims by the independent fact that decides them, where that is not what their own citation has."""
NEEDS: dict[str, list[str]] = read_toml(CLAIMS / "needs.toml")
"""Ids of claims by the means that an answer at the published size needs, the least first."""

MEASUREMENTS = {
    "activations": "activations:measure_activations", "bubble": "bubble:measure_bubbles",
    "interleaving": "bubble:measure_interleaving", "parameters": "counted:measure_built",
    "peak-memory": "memory:measure_memory", "recipe": "counted:measure_recipe", "released": "released:measure_released",
    "schedules": "bubble:measure_schedules", "tensor-parallel": "huggingface:measure_huggingface",
    "transformer-xl": "counted:measure_transformer_xl", "traffic": "traffic:measure_traffic",
    "words": "counted:measure_words", "zero-communication": "traffic:measure_sent_bytes",
    "zero-memory": "traffic:measure_held_bytes",
}  # fmt: skip
"""Module of `mlm_repro.experiments.measured` and its function, by the name that `measures` has in experiment.toml."""
TAKES_LONG = {"released": "scores released weights", "interleaving": "times pipelines on both cores"}
"""Measurements that `mlm-experiment run --all` leaves out, each with its reason."""


class Claim(Config):
    """One published number."""

    id: str
    source: str
    """Document it was read in."""
    where: str
    """Table, figure or part of the document."""
    series: str
    """Row or curve."""
    x: FiniteFloat | None
    """Position on the x axis, for a curve."""
    quantity: str
    value: Decimal
    """The number with the digits that were printed."""
    unit: str
    protocol: str = Field(min_length=1)
    """Measurement, as far as the source describes it."""
    relation: Literal["=", "<=", ">=", "order", "ratio", "sign"]
    """Required relation of our number to the value: equal, at most, at least, equal to the best place, equal up to a
    factor, of the same sign."""
    tolerance: str
    """`5%`: of the value; `±0.5`: in the claim's unit; `-1+2`, `-1%+2%`: more above than below; `digits`: half a unit
    of the last printed digit; `exact`: none. Of a ratio `50%` is a factor of 1.5."""
    because: str = Field(min_length=1)
    """Reason for the tolerance."""
    confidence: Literal["seen", "vec", "dig", "derived"]
    """seen: read in the source; vec: exact from its vector graphics; dig: digitised from a bitmap; derived: worked out
    of numbers that were seen."""
    notes: str

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not TOLERANCE.fullmatch(self.tolerance):
            raise ValueError(f"tolerance = {self.tolerance!r} is none of 5%, ±0.5, -1+2, -1%+2%, digits, exact")
        return self

    @property
    def paper(self) -> str:
        """Key of its paper in `PAPERS`."""
        return self.id.split("/")[0]

    @property
    def citation(self) -> str:
        """Document and place in it."""
        return f"{self.source} {self.where}"

    @property
    def published(self) -> str:
        """Value with unit, after ≤ or ≥; a sign claim prints "> 0" or "< 0"."""
        if self.relation == "sign":
            return "> 0" if self.value > 0 else "< 0"
        before = {"<=": "≤ ", ">=": "≥ "}.get(self.relation, "")
        return f"{before}{self.value} {self.unit}".rstrip()

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest number that agrees with the claim."""
        value = float(self.value)
        below, above = self._tolerances()
        match self.relation:
            case "sign":
                return (math.ulp(0.0), math.inf) if value > 0 else (-math.inf, -math.ulp(0.0))
            case "ratio":
                return value / (1 + below / value), value + above
            case "<=":
                return -math.inf, value + above
            case ">=":
                return value - below, math.inf
        return value - below, value + above

    def agrees(self, number: float) -> bool:
        """True if the number has the claimed relation to the value, up to tolerance and rounding."""
        low, high = self.bounds
        if self.relation == "sign":
            return low <= number <= high
        slack = 1e-9 * max(abs(end) for end in (low, high, 1e-3) if math.isfinite(end))
        if self.tolerance == "digits":  # a half is rounded away from zero: the end that is farther from it prints more
            return low - slack <= number < high - slack if self.value >= 0 else low + slack < number <= high + slack
        return low - slack <= number <= high + slack

    def _tolerances(self) -> tuple[float, float]:
        """Allowed distance below and above the value, in the claim's unit."""
        if self.tolerance in ("digits", "exact"):
            half = float(Decimal(1).scaleb(int(self.value.as_tuple().exponent)) / 2)
            return (half, half) if self.tolerance == "digits" else (0.0, 0.0)
        ends = [float(number) for number in re.findall(r"[\d.]+", self.tolerance)]
        unit = abs(float(self.value)) / 100 if "%" in self.tolerance else 1.0
        return ends[0] * unit, ends[-1] * unit


class Part(Config):
    """Workloads of an experiment and the quantities derived from them."""

    workloads: str
    """Name of a set in the `*-runs.csv` files of `experiments/published`."""
    x: str = ""
    """Column of the x axis."""
    baseline: str = ""
    """Set whose first row ratios refer to; empty for this set."""
    simulated: tuple[str, ...] = ()
    """Quantities derived from an iteration's time, the one that fits use first."""
    computed: tuple[str, ...] = ()
    """Quantities in closed form."""


class Arithmetic(Config):
    """A printed number that follows from other printed numbers."""

    claim: str
    """Id of the claim."""
    of: tuple[str, ...]
    """Ids of the numbers that it is made of; `*` stands for any characters."""
    over: str = ""
    """Ids of the numbers that those are divided by, at the same x."""
    how: Literal["largest", "least", "ends", "spread", "place", "power"]
    """The largest or the least quotient; the quotient of the largest of each; the largest over the least of a series,
    in that series where this is most; the x of the largest; the number to the power `exponent`."""
    percent: Literal["", "more", "less"] = ""
    """Say a quotient as percent more or less than 1."""
    exponent: tuple[float, float] = (1.0, 1.0)
    """Numerator and denominator of a power."""

    @property
    def value(self) -> float:
        """The number, from the claims."""
        numbers, others = ([claim for claim in every_claim() if matches(claim, ids)] for ids in (self.of, (self.over,)))
        if self.how == "place":
            return max(numbers, key=lambda claim: claim.value).x or 0.0
        if self.how == "power":
            return float(numbers[0].value) ** (self.exponent[0] / self.exponent[1])
        series: dict[str, list[float]] = {}
        for claim in numbers:
            series.setdefault(f"{claim.where} {claim.series}", []).append(float(claim.value))
        spread = max(max(values) / min(values) for values in series.values())
        by_x = {claim.x: float(claim.value) for claim in others}
        quotients = [float(claim.value) / by_x[claim.x] for claim in numbers if claim.x in by_x] or [spread]
        ends = max(float(claim.value) for claim in numbers) / max([*by_x.values()] or [1.0])
        quotient = {"largest": max(quotients), "least": min(quotients), "ends": ends, "spread": spread}[self.how]
        return {"": quotient, "more": 100 * (quotient - 1), "less": 100 * (1 - quotient)}[self.percent]


class Arm(Config):
    """One side of an ablation: its changes to the recipe."""

    name: str
    """Series of its records."""
    model: dict[str, Any] = Field(default_factory=dict)
    train: dict[str, Any] = Field(default_factory=dict)
    rates: tuple[float, ...] = ()
    """Learning rates to try instead of the ablation's."""
    of_rate: float = Field(default=1.0, gt=0)
    """Multiplier on the learning rate that the search found."""
    rate_of: str = Field(default="", exclude_if=operator.not_)
    """Earlier arm whose found rate it multiplies; it has no search of its own."""
    dataset: int = Field(default=0, ge=0)
    """Index of its dataset among the given ones, which hold the same text in different tokens."""


class Effect(Config):
    """A claim about the difference of a quantity between two arms."""

    claim: str
    """Id of the published claim that it answers."""
    of: str
    """Arm whose quantity comes first in the difference; `less` is the arm that is subtracted."""
    less: str
    quantity: Literal["validation_loss", "bits_per_byte"] = "validation_loss"
    """Quantity at the end of training, in nats per token or bits per byte."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Fraction of training at which the quantity is read; 1 is the end."""
    above: FiniteFloat | None = None
    """The difference is claimed to be greater than this."""
    below: FiniteFloat | None = None
    """The difference is claimed to be less than this."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.above is None and self.below is None:
            raise ValueError(f"the effect of {self.claim} claims nothing: give above, below or both")
        return self

    @property
    def better(self) -> tuple[str, ...]:
        """The arm that is claimed to end lower; both where neither is."""
        if self.above is not None and self.above >= 0:
            return (self.less,)
        return (self.of,) if self.below is not None and self.below <= 0 else (self.of, self.less)

    @property
    def claimed(self) -> str:
        """The claimed range in words: `above 0`, `above -0.05 and below 0.05`."""
        ends = (("above", self.above), ("below", self.below))
        return " and ".join(f"{side} {end:g}" for side, end in ends if end is not None)


ABLATION = "ablation"
"""Kind of an ablation's run, and what its name begins with."""


class Ablation(Config):
    """Small trainings that differ in one thing, over several seeds, and the effects that are claimed."""

    question: str
    model: dict[str, Any]
    train: dict[str, Any]
    arms: tuple[Arm, ...]
    effects: tuple[Effect, ...]
    rates: tuple[float, ...] = ()
    """Learning rates that every arm is tried at with a seed of its own; it is trained at the best."""
    search_share: float = Field(default=0.2, gt=0, le=1)
    """Length of a trial over that of a training."""
    finder: tuple[float, float] | None = None
    """Ends of a learning-rate finder's sweep over as many iterations, which gives the rate in place of trials."""
    seeds: int = Field(default=5, ge=5, le=8)
    """Number of seeds for every arm; the forecast's digest gives them."""
    level: float = Field(default=0.95, gt=0, lt=1)
    """Level of the paired t intervals over seeds."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = {arm.name for arm in self.arms}
        for effect in self.effects:
            if not {effect.of, effect.less} <= names:
                raise ValueError(f"the effect of {effect.claim} is about an arm that is not one of {sorted(names)}")
        for place, arm in enumerate(self.arms):
            if not (self.finder or arm.rates or self.rates):
                raise ValueError(f"the arm {arm.name!r} has no rates to try")
            if arm.rate_of and arm.rate_of not in {earlier.name for earlier in self.arms[:place]}:
                raise ValueError(f"the arm {arm.name!r} takes the rate of {arm.rate_of!r}, which is no earlier arm")
        return self


class Expected(Config):
    """expected.toml: the claims an experiment answers."""

    claims: tuple[str, ...]
    """Ids; `*` stands for any characters."""


class Unanswered(Config):
    """Claims that no experiment answers."""

    claims: tuple[str, ...]
    """Ids; `*` stands for any characters."""
    reason: str
    """Reason, and the command that would answer them if there is one."""


class UnansweredClaims(Config):
    """unanswered.toml: the claims without an experiment, with reasons."""

    context: tuple[Unanswered, ...]
    """Numbers of others, which nobody would reproduce here."""
    missing: tuple[Unanswered, ...]
    """Numbers that wait for machines, data or weights."""


class Experiment(Config):
    """experiment.toml: a published table or figure."""

    name: str
    title: str
    shows: str
    """One sentence about what it shows."""
    chart: Literal["curves", "table"] = "curves"
    """Form of the exhibit in the report."""
    parts: tuple[Part, ...] = ()
    arithmetic: tuple[Arithmetic, ...] = ()
    """Claims that follow from other claims."""
    reproduction: str = ""
    """Model whose reproduction (`mlm-experiment reproduce`) answers it."""
    extrapolates: Literal["", "sizes", "tokens"] = ""
    """Axis over which some of its claims are predicted from the others (`mlm_repro.experiments.forecast.published`)."""
    ablation: Ablation | None = None
    """Trainings that `mlm-experiment ablate` makes for it."""
    measures: str = ""
    """Measurement that `mlm-experiment run` makes for it on this machine, a name of `MEASUREMENTS`."""
    not_run: str = ""
    """Reason for which claims about other quantities are not answered."""
    expected: Expected

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.measures and self.measures not in MEASUREMENTS:
            raise ValueError(f"measures = {self.measures!r} is none of {', '.join(MEASUREMENTS)}")
        return self

    @cached_property
    def claims(self) -> tuple[Claim, ...]:
        """The claims it answers, in the catalogue's order."""
        return tuple(claim for claim in every_claim() if matches(claim, self.expected.claims))

    def produces(self, quantity: str) -> bool:
        """True if a run of it gives numbers of this quantity."""
        return bool(self.reproduction or self.extrapolates or self.ablation or self.measures or self.arithmetic) or any(
            quantity in (*part.simulated, *part.computed) for part in self.parts
        )


@cache
def every_claim() -> tuple[Claim, ...]:
    """The claims of this suite, read once."""
    return load_claims(CLAIMS)


def load_claims(folder: Path) -> tuple[Claim, ...]:
    """Every claim of the folder's CSV files. Raises BadInput with file and line for an invalid or repeated claim."""
    claims: dict[str, Claim] = {}
    for path in sorted(folder.glob("*.csv")):
        for line, row in enumerate(read_rows(path), 2):
            claim = parse_config({**row, "x": row.get("x") or None}, Claim, f"{path} line {line}")
            if claim.id in claims:
                raise BadInput(f"{path} line {line}: there are two claims {claim.id!r}")
            claims[claim.id] = claim
    return tuple(claims.values())


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file by column name. Raises BadInput if it cannot be read."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path} cannot be read: {cause(error)}") from error


@cache
def unanswered_claims() -> UnansweredClaims:
    """The claims that no experiment answers, with reasons; read once."""
    return load_config(HERE / "unanswered.toml", UnansweredClaims)


class Erratum(Config):
    """A place where a document disagrees with itself."""

    place: str
    """Document and place in it."""
    printed: str
    follows: str
    """Numbers that follow from the document's own."""
    claims: tuple[str, ...]
    """Ids of the printed numbers; `*` stands for any characters."""


class Errata(Config):
    """errata.toml: what was found wrong in documents, in the order of docs/errata.md."""

    errata: tuple[Erratum, ...]


def matches(claim: Claim, patterns: Iterable[str]) -> bool:
    """True if a pattern is the claim's id; `*` stands for any characters."""
    return _expression(tuple(patterns)).match(claim.id) is not None


@cache
def _expression(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)) or r"(?!)")


@cache
def every_erratum() -> tuple[Erratum, ...]:
    """The errata found in the documents, read once."""
    return load_config(CLAIMS / "errata.toml", Errata).errata


def erratum_of(claim: Claim) -> Erratum | None:
    """The erratum that a printed number is part of."""
    return next((erratum for erratum in every_erratum() if matches(claim, erratum.claims)), None)


def group_of(claim: Claim, groups: Mapping[str, Iterable[str]]) -> str | None:
    """The first group, such as one of `FACTS` or `NEEDS`, that has the claim's id."""
    return next((group for group, patterns in groups.items() if matches(claim, patterns)), None)


@cache
def load_experiments() -> Mapping[str, Experiment]:
    """Every experiment by its name, in the order of the papers, read once."""

    def natural(experiment: Experiment) -> list[int | str]:
        """Sorts figure-6 before figure-11, and years before names."""
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", experiment.name)]

    loaded = []
    for path in HERE.glob("*/*/experiment.toml"):
        expected = load_config(path.parent / "expected.toml", Expected)
        loaded.append(parse_config({**read_toml(path), "expected": expected}, Experiment, str(path)))
    return {experiment.name: experiment for experiment in sorted(loaded, key=natural)}


def find_experiment(name: str) -> Experiment:
    """The experiment of that name. Raises BadInput for any other."""
    experiments = load_experiments()
    if name not in experiments:
        every = f"`mlm-experiment list` shows the {len(experiments)} there are"
        raise BadInput(f"there is no experiment {name!r}; {did_you_mean(name, experiments, every)}")
    return experiments[name]


def ablation_of(experiment: Experiment) -> Ablation:
    """The experiment's ablation. Raises BadInput if it has none."""
    if experiment.ablation is None:
        names = ", ".join(other.name for other in load_experiments().values() if other.ablation)
        raise BadInput(f"{experiment.name} has no ablation; there are {names}")
    return experiment.ablation
