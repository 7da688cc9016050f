"""The published claims and the experiments that answer them, read from the files beside this one.
Imports no torch."""

import csv
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from decimal import Decimal
from fnmatch import translate
from functools import cache, cached_property
from math import inf, isfinite, ulp
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from mlm_repro.experiments.ranges import Range, as_range, farthest
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.config import Config, load_config, parse_config, read_toml
from mlm_repro.lineage.errors import BadInput, cause, did_you_mean
from mlm_repro.lineage.records import Record

HERE = Path(__file__).parent
CLAIMS = HERE / "claims"
TOLERANCE = (
    r"digits|exact|±\d+(\.\d+)?|×\d+(\.\d+)?|\d+(\.\d+)?%|"
    r"-\d+(\.\d+)?\+\d+(\.\d+)?|-\d+(\.\d+)?%\+\d+(\.\d+)?%"
)

PAPERS: dict[str, str] = read_toml(CLAIMS / "papers.toml")
"""Titles of the papers, by the first part of the ids of their claims and the names of their
experiments."""
FACTS: dict[str, list[str]] = read_toml(CLAIMS / "facts.toml")
"""Lists of patterns of claims' ids by the fact, a sentence, with which these claims hold or fail
together; other claims are grouped by their sentence or citation."""
UNANSWERED: dict[str, list[JSON]] = read_toml(HERE / "unanswered.toml")
"""Claims that no experiment answers, each with the reason: numbers that a paper quotes from others
as `context`, and claims that wait for machines, data or weights as `missing`."""
NEEDS: dict[str, list[str]] = read_toml(CLAIMS / "needs.toml")
"""Lists of patterns of claims' ids by the means that an answer at the published size needs, such as
"one GPU"; the least comes first, and the first that matches counts."""

MEASUREMENTS = {
    "activations": "activations:measure_activations",
    "bubble": "bubble:measure_bubbles",
    "parameters": "counted:measure_built",
    "peak-memory": "memory:measure_memory",
    "recipe": "counted:measure_recipe",
    "released": "released:measure_released",
    "schedules": "bubble:measure_schedules",
    "tensor-parallel": "huggingface:measure_huggingface",
    "transformer-xl": "counted:measure_transformer_xl",
    "traffic": "traffic:measure_traffic",
    "words": "counted:measure_words",
    "zero-communication": "traffic:measure_sent_bytes",
}
"""Texts `MODULE:FUNCTION`, a module of `mlm_repro.experiments.measured` and its function, by the
name that `measures` has in experiment.toml."""
TAKES_LONG = {"released": "scores released weights"}
"""Measurements that `mlm-experiment run --all` leaves out, each with its reason."""


Says = Literal["exact", "about", "at most", "at least", "there is", "for all"]
SAYS: dict[str, dict[str, str]] = read_toml(CLAIMS / "says.toml")
"""A dict for each class of sentences: the `words` that show it, a regular expression; the
`relation` that our number must have to the value; which number `of_a_set` is meant; and the word
`before` the shown value."""
ABOUT = 0.1
"""Largest share by which a number may differ from a published one that is called "about"."""


class Tolerance(Config):
    """An entry of tolerances.toml: in `tolerance` how far from the value of a claim a measurement
    may lie, a text such as `±0.5`, in the claim's unit, or `5%`, of the value; in `claims` the ids
    of the claims for which it counts, or patterns with `*`; in `because` the reason. It is not
    added to the rounding of the printed digits: the wider of the two counts."""

    claims: tuple[str, ...]
    """Ids of claims; `*` stands for any characters."""
    tolerance: Annotated[str, Field(pattern=rf"^({TOLERANCE})$")]
    """`digits`: by rounding alone; `exact`: not even by that; `±0.5`: in the claim's unit; `5%`: of
    the value; `×2`: from half the value to twice it; `-1+2` or `-1%+2%`: below and above apart."""
    because: str = Field(min_length=1)


DIGITS = Tolerance(claims=("*",), tolerance="digits", because="rounding of the printed digits")


class Claim(Config):
    """A published number with its source, or the direction of a published difference, whose value
    is 0."""

    id: str
    source: str
    """Document in which the claim was read."""
    where: str
    """Table, figure or part of the document that has the claim."""
    series: str
    """Row of the table or curve of the figure that has the number."""
    x: FiniteFloat | None
    """Position on the x axis; None where the series has no axis."""
    quantity: str
    value: Decimal
    """The number with the digits that were printed; 0 for a direction."""
    unit: str
    protocol: str = Field(min_length=1)
    """Way of the measurement, as far as the source describes it."""
    says: Says
    """Class of the sentence, a key of says.toml: the required relation of our number follows."""
    sentence: str
    """Quotation of at most 25 words with its hedge; empty for the cell of a table and the point of
    a figure."""
    confidence: Literal["seen", "vec", "dig", "derived"]
    """seen: read in the source; vec: exact from its vector graphics; dig: digitised from a bitmap;
    derived: worked out of numbers that were seen."""
    notes: str

    @property
    def paper(self) -> str:
        """The key of the claim's paper in `PAPERS`, such as `2021`: the first part of its id."""
        return self.id.split("/")[0]

    @property
    def asked(self) -> str:
        """A text of all that decides whether a number agrees with the claim: its class, value,
        unit, tolerance and sentence, with spaces between."""
        return f"{self.says} {self.value} {self.unit} {self.allowed.tolerance} {self.sentence}"

    @property
    def citation(self) -> str:
        """The origin of the claim as a text: the document, then its table, figure or section."""
        return f"{self.source} {self.where}"

    def record(self, experiment: str, x_name: str) -> Record:
        """Return the published number as a Record of kind "published" of the experiment called
        `experiment`; `x_name` names the x axis."""
        return Record(
            experiment=experiment,
            series=self.series,
            quantity=self.quantity,
            value=float(self.value),
            kind="published",
            source=self.citation,
            unit=self.unit,
            x=self.x,
            x_name=x_name,
            note=self.notes,
        )

    @property
    def relation(self) -> str:
        """The relation that our number must have to the published value, as one of the texts =, <=
        and >=."""
        return SAYS[self.says]["relation"]

    @property
    def is_direction(self) -> bool:
        """True if the claim says only which of two quantities is larger, without a number."""
        return not self.value and self.says in ("at least", "at most")

    @property
    def published(self) -> str:
        """The published value as text with its unit, after a word such as "about" that its class
        gives; a direction is "> 0" or "< 0"."""
        if self.is_direction:
            return "> 0" if self.says == "at least" else "< 0"
        return f"{SAYS[self.says]['before']}{self.value:f} {self.unit}".rstrip()

    @cached_property
    def allowed(self) -> Tolerance:
        """The Tolerance of a measurement that answers the claim: the first in tolerances.toml that
        names it, else the rounding of the printed digits."""
        return next((each for each in every_tolerance() if matches(self, each.claims)), DIGITS)

    @property
    def printed(self) -> Range:
        """The Range of numbers that round to the claim's value at its number of printed digits. A
        claim with the tolerance "exact" has its value alone, and one that says "about" at least a
        tenth of it either way."""
        value = float(self.value)
        read = as_range(value) if self.allowed.tolerance == "exact" else Range.printed(self.value)
        if self.says == "about":
            return Range(
                value, min(read.low, (1 - ABOUT) * value), max(read.high, (1 + ABOUT) * value)
            )
        return read

    def bounds(self, measured: bool = True) -> tuple[float, float]:
        """Return a pair, the least and the greatest number that agrees with the claim; an end that
        the claim leaves open is infinite. A claim of a direction alone agrees with all numbers
        above zero, or with all below it.

        If `measured` is true, an end that is not open is the farther of two numbers: that end of
        the range in the attribute `printed`, and the value less or plus the claim's tolerance. If
        it is false, for a number computed from other printed numbers, that range alone counts.
        """
        if self.is_direction:
            return (ulp(0.0), inf) if self.says == "at least" else (-inf, -ulp(0.0))
        value, below, above = float(self.value), *(self._tolerances() if measured else (0.0, 0.0))
        low = min(self.printed.low, value - below)
        high = max(self.printed.high, value + above)
        relation = self.relation
        return (-inf if relation == "<=" else low), (inf if relation == ">=" else high)

    def agrees(self, number: Range | float, measured: bool = True) -> bool:
        """Return True if the number, or one in the range, can have the claimed relation to the
        published value.

        Rounding counts in its favour, and so does the claim's tolerance if `measured` is true.
        """
        ours = as_range(number)
        low, high = self.bounds(measured)
        if self.is_direction:
            return low <= ours.high and ours.low <= high
        slack = 1e-9 * max(abs(end) for end in (low, high, 1e-3) if isfinite(end))
        is_rounding = (
            (low, high) == (self.printed.low, self.printed.high)
            and low < high
            and self.says != "about"
        )
        # A half is rounded away from zero: the farther end prints more.
        if ours.low == ours.high and is_rounding:
            if self.value >= 0:
                return low - slack <= ours.value < high - slack
            return low + slack < ours.value <= high + slack
        return low - slack <= ours.high and ours.low <= high + slack

    def _tolerances(self) -> tuple[float, float]:
        """Return a pair of distances, both at least 0 and in the claim's unit, by the Tolerance in
        the attribute `allowed`: how far below the value a measurement may lie, and how far above
        it. Both are 0 for "exact" and "digits", which have no number; rounding may allow more."""
        text = self.allowed.tolerance
        value = abs(float(self.value))
        ends = [float(number) for number in re.findall(r"[\d.]+", text)]
        if not ends:
            return 0.0, 0.0
        if text.startswith("×"):
            return value - value / ends[0], value * ends[0] - value
        unit = value / 100 if "%" in text else 1.0
        return ends[0] * unit, ends[-1] * unit


class Part(Config):
    """Numbers that an experiment derives from published workloads: the name of their set,
    `workloads`, and the names of the quantities that are `simulated`, or `computed` in closed form,
    for each workload."""

    workloads: str
    """Name of a set in the `*-runs.csv` files of `experiments/published`."""
    x: str = ""
    """Column of the workloads' files that is the x axis; empty without an axis."""
    baseline: str = ""
    """Set whose first row ratios refer to; empty for this set."""
    simulated: tuple[str, ...] = ()
    """Quantities derived from the time of an iteration or of a layer, the one that fits use
    first."""
    computed: tuple[str, ...] = ()
    """Quantities that are computed in closed form."""


class Arithmetic(Config):
    """A printed number that can be computed from other printed numbers, and the operation."""

    claim: str
    """Id of the claim whose number is computed."""
    of: tuple[str, ...]
    """Ids of the numbers that it is made of; `*` stands for any characters."""
    over: str = ""
    """Ids of the numbers by which those are divided, or which are subtracted, at the same x but in
    `ends`; `*` stands for any characters. Empty if there are none."""
    how: Literal["each", "ends", "spread", "place", "power", "difference", "sum"] = "each"
    """The quotient at each x; the quotient of the largest of each; the largest over the least of
    each series; the x of the largest; the number to the power `exponent`; the difference; the sum.
    Of several the claim's class picks one."""
    percent: Literal["", "more", "less"] = ""
    """Say a quotient as percent more or less than 1."""
    exponent: tuple[float, float] = (1.0, 1.0)
    """Numerator and denominator of the power for `how` = "power"."""

    def worked_out(self, says: Says) -> Range:
        """Return, as a Range, the number that follows by this object's operation `how` from the
        printed digits of those claims of the catalogue that its `of` and `over` name, with the
        range that rounding allows. The operations "place" and "power" give one number without a
        range, "place" 0 if the largest number has no x. `says` is the class of the claim that it
        answers.

        With `percent`, a quotient or difference q becomes 100 · (q − 1) if it is "more", 100 ·
        (1 − q) if it is "less". Of several results, the classes "at least" and "for all" take the
        least, other classes the largest.
        """
        pick = min if SAYS[says]["of_a_set"] == "least" else max
        numbers, others = (
            [claim for claim in every_claim() if matches(claim, ids)]
            for ids in (self.of, (self.over,))
        )
        series = defaultdict(list)
        for claim in numbers:
            series[claim.where, claim.series].append(claim.printed)
        match self.how:
            case "place":
                return as_range(max(numbers, key=lambda claim: claim.value).x or 0.0)
            case "sum":
                return sum((claim.printed for claim in numbers), as_range(0.0))
            case "power":
                return as_range(float(numbers[0].value) ** (self.exponent[0] / self.exponent[1]))
            case "spread":
                quotients = [farthest(max, each) / farthest(min, each) for each in series.values()]
            case "ends":
                most = [
                    farthest(max, (claim.printed for claim in each)) for each in (numbers, others)
                ]
                quotients = [most[0] / most[1]]
            case _:
                by_x = {claim.x: claim.printed for claim in others}
                pairs = [
                    (claim.printed, by_x.get(claim.x, as_range(1.0)))
                    for claim in numbers
                    if claim.x in by_x or not others
                ]
                quotients = [a - b if self.how == "difference" else a / b for a, b in pairs]
        said = {
            "": lambda one: one,
            "more": lambda one: 100 * (one - 1),
            "less": lambda one: 100 * (1 - one),
        }
        return farthest(pick, map(said[self.percent], quotients))


class Arm(Config):
    """One of the recipes that an ablation compares, as changes to the common recipe."""

    name: str
    """Name of the arm, and series of its records."""
    model: JSON = Field(default_factory=dict)
    train: JSON = Field(default_factory=dict)
    rates: tuple[float, ...] = ()
    """Learning rates to try for this arm in place of the ablation's."""
    of_rate: float = Field(default=1.0, gt=0)
    """Multiplier on the learning rate that the search found."""
    rate_of: str = Field(default="", exclude_if=operator.not_)
    """Earlier arm whose found rate it multiplies; it has no search of its own."""
    dataset: int = Field(default=0, ge=0)
    """Index of its dataset among the given ones, which hold the same text in different tokens."""


class Effect(Config):
    """A claim, whose id is `claim`, about the difference between two arms of an ablation: the
    `quantity` of the arm `of` minus the quantity of the arm `less`, at the fraction `share` of
    training, is greater than `above` and less than `below`, as far as these are given."""

    claim: str
    """Id of the published claim that it answers; a question of our own has an id that no claim
    has."""
    of: str
    """Arm whose quantity comes first in the difference; `less` is the arm that is subtracted."""
    less: str
    quantity: Literal["validation_loss", "bits_per_byte"] = "validation_loss"
    """Validation loss in nats per token, or in bits per byte."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Fraction of training at which the quantity is read; 1 is the end."""
    above: FiniteFloat | None = None
    """The difference is claimed to be greater than this; None without such a bound."""
    below: FiniteFloat | None = None
    """The difference is claimed to be less than this; None without such a bound."""

    @property
    def better(self) -> tuple[str, ...]:
        """The name of the arm that is claimed to have the lower loss, as a tuple; both names if the
        claim says no such thing."""
        if self.above is not None and self.above >= 0:
            return (self.less,)
        return (self.of,) if self.below is not None and self.below <= 0 else (self.of, self.less)

    @property
    def claimed(self) -> str:
        """The claimed range of the difference in words: `above 0`, `above -0.05 and below 0.05`;
        empty without a bound."""
        ends = (("above", self.above), ("below", self.below))
        return " and ".join(f"{side} {end:g}" for side, end in ends if end is not None)


ABLATION = "ablation"
"""Kind of an ablation's run, key of the ablation in that run's configuration, and first word of the
name of its sealed forecast."""


class Ablation(Config):
    """Small trainings that answer one `question`: the common recipe `model` and `train`, its
    variants `arms`, each trained with several seeds, and `effects`, claimed differences, each
    between two arms."""

    question: str
    model: JSON
    train: JSON
    arms: tuple[Arm, ...]
    effects: tuple[Effect, ...]
    rates: tuple[float, ...] = ()
    """Learning rates that every arm is tried at with a seed of its own; it is trained at the
    best."""
    search_share: float = Field(default=0.2, gt=0, le=1)
    """Length of a trial of a learning rate as a share of a training's."""
    finder: tuple[float, float] | None = None
    """Lowest and highest rate of a learning-rate finder's sweep over as many iterations, which
    gives the rate in place of trials; None if trials give it."""
    seeds: int = Field(default=5, ge=5, le=8)
    """Number of seeds for every arm; the forecast's digest gives them."""
    level: float = Field(default=0.95, gt=0, lt=1)
    """Level of the paired t intervals over seeds, a fraction."""


class Expected(Config):
    """expected.toml: a list of the ids of the claims that an experiment answers, in which `*`
    stands for any characters."""

    claims: tuple[str, ...]
    """Ids of the claims; `*` stands for any characters."""


class Experiment(Config):
    """experiment.toml: a published table or figure, and how its claims are answered here: by
    arithmetic, simulation, a measurement, a reproduction or trainings."""

    name: str
    title: str
    shows: str
    """One sentence about what the table or figure shows."""
    chart: Literal["curves", "table"] = "curves"
    """Form of the experiment's exhibit in the report."""
    parts: tuple[Part, ...] = ()
    arithmetic: tuple[Arithmetic, ...] = ()
    """Claims whose numbers follow from other claims' numbers."""
    reproduction: str = ""
    """Model whose reproduction (`mlm-experiment reproduce`) answers the experiment's claims."""
    ablation: Ablation | None = None
    """Trainings that `mlm-experiment ablate` makes for the experiment."""
    measures: str = ""
    """Measurement that `mlm-experiment run` makes for it on this machine, a name of
    `MEASUREMENTS`."""
    not_run: str = ""
    """Reason for which claims about other quantities are not answered."""
    expected: Expected

    @cached_property
    def claims(self) -> tuple[Claim, ...]:
        """A tuple of the Claims that the experiment answers, in the catalogue's order."""
        return tuple(claim for claim in every_claim() if matches(claim, self.expected.claims))

    def produces(self, quantity: str) -> bool:
        """Return True if running the experiment may give numbers of `quantity`, a quantity's name:
        if one of the experiment's parts simulates or computes that quantity. An experiment that
        measures, trains or has arithmetic may give any quantity."""
        return bool(self.reproduction or self.ablation or self.measures or self.arithmetic) or any(
            quantity in (*part.simulated, *part.computed) for part in self.parts
        )


@cache
def every_claim() -> tuple[Claim, ...]:
    """Return a tuple of every published Claim that this suite ships, in the order of file names and
    rows; the files are read once a process. Raises BadInput if one cannot be read or has an invalid
    row."""
    return load_claims(CLAIMS)


def load_claims(folder: Path) -> tuple[Claim, ...]:
    """Return a tuple of the Claims in the CSV files of `folder`, in the order of file names and
    rows.

    Raises BadInput if a file cannot be read, and with file and line if a row is not a valid claim.
    """
    claims = []
    for path in sorted(folder.glob("*.csv")):
        claims += [
            parse_config({**row, "x": row.get("x") or None}, Claim, f"{path} line {line}")
            for line, row in enumerate(read_rows(path), 2)
        ]
    return tuple(claims)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return a list of the rows of the CSV file at `path` as dicts of texts by column name; the
    first line has the names. A row with too few cells has None under the last names, and one with
    too many has a list of the others under the key None. Raises BadInput if the file is missing or
    cannot be read."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(
            f"{path} cannot be read: {cause(error)}; give a file with columns, as CSV in UTF-8"
        ) from error


@cache
def every_tolerance() -> tuple[Tolerance, ...]:
    """Return a tuple of the Tolerances in tolerances.toml in the file's order; the file is read
    once a process."""
    return tuple(Tolerance(**row) for row in read_toml(CLAIMS / "tolerances.toml")["tolerances"])


class Quotation(Config):
    """A quotation from a document: `words`, the quoted text, and `place`, where it stands, such as
    `Section 5` or `Table 5, caption`."""

    words: str
    place: str


class Erratum(Config):
    """An error in a published document, a row of errata.toml: a passage, `printed`, that
    contradicts its own numbers or another passage, or seems to (the kind "a question"). `follows`
    has the right words, `quotations` their evidence, and `claims` patterns of the ids of the claims
    that it concerns."""

    title: str
    document: str
    place: str
    kind: Literal["arithmetic", "two sentences disagree", "a question"]
    """arithmetic: no rounding explains the printed number; a question: another reading is
    possible."""
    printed: str
    follows: str
    """The right words, as they follow from the quotations."""
    quotations: tuple[Quotation, ...]
    """All that it follows from, with the digits."""
    formula: str
    text: str
    command: str
    found: str
    """The person who found it first, with the date and the place where they said so; `here` if
    nobody else is known."""
    answered: str
    """An author's answer in public, or that none is known."""
    claims: tuple[str, ...]
    """Ids of the printed numbers; `*` stands for any characters."""


class Cleared(Quotation):
    """A sentence of a document that looks like an erratum but is right, a row `cleared` of
    errata.toml: its `words`, its `place` and the `reason` why it is right."""

    reason: str


class Errata(Config):
    """Content of errata.toml: errors found in the published documents, and sentences that were
    checked and found right."""

    errata: tuple[Erratum, ...]
    cleared: tuple[Cleared, ...]


def matches(claim: Claim, patterns: Iterable[str]) -> bool:
    """Return True if one of the patterns matches the claim's whole id; in a pattern `*` stands for
    any characters."""
    return _expression(tuple(patterns)).match(claim.id) is not None


@cache
def _expression(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)) or r"(?!)")


@cache
def read_errata() -> Errata:
    """Return errata.toml as an Errata. The file is read once a process."""
    return load_config(CLAIMS / "errata.toml", Errata)


def erratum_of(claim: Claim) -> Erratum | None:
    """Return the first Erratum in errata.toml that names this claim; None if there is none."""
    return next(
        (erratum for erratum in read_errata().errata if matches(claim, erratum.claims)), None
    )


def group_of(claim: Claim, groups: Mapping[str, Iterable[str]]) -> str | None:
    """Return the name of the first group with a pattern that matches the claim's whole id, as
    `matches` decides; None if there is none. `groups` has a list of patterns, in which `*` stands
    for any characters, by the group's name, as `FACTS` and `NEEDS` have."""
    return next((group for group, patterns in groups.items() if matches(claim, patterns)), None)


@cache
def load_experiments() -> Mapping[str, Experiment]:
    """Return a dict of all Experiments by name, in the order of their names: figure-6 before
    figure-11, years before words. Their files are read once a process. Raises BadInput if a file is
    not valid."""

    def natural(experiment: Experiment) -> list[int | str]:
        """Return an experiment's sort key, a list, which puts figure-6 before figure-11."""
        return [
            int(part) if part.isdigit() else part for part in re.split(r"(\d+)", experiment.name)
        ]

    loaded = []
    for path in HERE.glob("*/*/experiment.toml"):
        expected = load_config(path.parent / "expected.toml", Expected)
        loaded.append(
            parse_config({**read_toml(path), "expected": expected}, Experiment, str(path))
        )
    return {experiment.name: experiment for experiment in sorted(loaded, key=natural)}


def find_experiment(name: str) -> Experiment:
    """Return the Experiment called `name`, such as "2021/figure-11". Raises BadInput if there is
    none."""
    experiments = load_experiments()
    if name not in experiments:
        every = f"`mlm-experiment list` shows the {len(experiments)} there are"
        raise BadInput(f"there is no experiment {name!r}; {did_you_mean(name, experiments, every)}")
    return experiments[name]


def ablation_of(experiment: Experiment) -> Ablation:
    """Return the experiment's Ablation. Raises BadInput if it has none."""
    if experiment.ablation is None:
        names = ", ".join(other.name for other in load_experiments().values() if other.ablation)
        raise BadInput(
            f"{experiment.name} has no ablation to train; the experiments that have one are {names}"
        )
    return experiment.ablation
