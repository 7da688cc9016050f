"""The files of a reproduction as typed values, with a sentence for each that is unusable."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlm_repro.data_pipeline.files import DATASET, LEDGER, DataCard, Ledger
from mlm_repro.engine.run.files import SUMMARY
from mlm_repro.evaluation.schema import Result
from mlm_repro.experiments.files import EVALUATIONS, SCORES, ReproductionScores, read_evaluations
from mlm_repro.experiments.reproduce.files import ReproductionSummary
from mlm_repro.lineage.digest import MARKER, check_seal, is_sealed, read_digest
from mlm_repro.lineage.errors import BadInput, IntegrityFailure, UserError
from mlm_repro.lineage.files import Manifest, SchemaT, parse_document, read_document
from mlm_repro.lineage.records import RECORDS, Kind, Record, read_records
from mlm_repro.lineage.run import MANIFEST, RunDirectory


@dataclass(frozen=True)
class Problem:
    """A sentence on something that the page cannot show."""

    part: str
    """File that the sentence is about."""
    sentence: str
    damaged: bool
    """False if the file is only absent or empty; True if it changed after it was written."""


class Problems(list[Problem]):
    """Problems gathered while files are read."""

    def add(self, part: str, sentence: str, damaged: bool = True) -> None:
        """Add a problem."""
        self.append(Problem(part, sentence, damaged))

    def of(self, part: str) -> list[str]:
        """The sentences on one file."""
        return [problem.sentence for problem in self if problem.part == part]

    def document(self, path: Path, model: type[SchemaT], part: str, what: str) -> SchemaT | None:
        """Read a file with a schema; None if it is absent, or if it does not fit, which becomes a Problem."""
        with self.noting(part, what):
            return read_document(path, model) if path.is_file() else None
        return None

    @contextmanager
    def noting(self, part: str, what: str) -> Iterator[None]:
        """Make a Problem of an error in the block."""
        try:
            yield
        except UserError as error:
            self.add(part, f"{what} cannot be shown: {error}.")


@dataclass(frozen=True)
class Reproduction:
    """Everything that a page is made from."""

    directory: Path
    manifest: Manifest
    digest: str | None
    """Digest of the run; None if it is unfinished."""
    summary: ReproductionSummary
    records: tuple[Record, ...]
    ledger: Ledger | None
    card: DataCard | None
    scores: ReproductionScores | None
    """None if an earlier version made the run."""
    evaluations: dict[str, Result]
    """Results by file stem."""
    problems: Problems

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.directory.name

    @property
    def own_kind(self) -> Kind:
        """The kind of the numbers that this reproduction made."""
        return "scaled" if self.summary.mode == "scaled" else "measured"

    @property
    def stands_in(self) -> bool:
        """True if texts held out from the run's own data stand in for the published test sets."""
        return any(record.quantity.startswith("heldout_") for record in self.select("2019/table-3"))

    @property
    def order(self) -> list[str]:
        """Series of the summary, smallest first, then the others of the records by name."""
        named = dict.fromkeys(model.series for model in self.summary.models)
        return list(named | dict.fromkeys(sorted(record.series for record in self.records)))

    @property
    def command(self) -> str:
        """The command that makes its numbers again; empty if the summary has none."""
        return next(iter(self.summary.commands.values()), "")

    def select(self, experiment: str, *quantities: str) -> list[Record]:
        """Records of a published table or figure in file order, of all quantities or of the named ones."""
        return [record for record in self.records
                if record.experiment == experiment and (not quantities or record.quantity in quantities)]  # fmt: skip


def newest_reproduction(runs: Path) -> Path:
    """The complete `reproduce-*` directory under `runs` that was begun last. Raises BadInput without one."""
    reproductions = [path for path in sorted(runs.glob("reproduce-*")) if path.is_dir() and not path.is_symlink()]
    complete = [path for path in reproductions if is_sealed(path)]
    if not complete:
        unfinished = f" ({len(reproductions)} unfinished)" if reproductions else ""
        raise BadInput(f"there is no complete reproduction (reproduce-*) under {runs}{unfinished}")
    return max(complete, key=lambda path: str(RunDirectory(path).manifest.get("created", "")))


def load_reproduction(directory: Path) -> Reproduction:
    """Read a reproduction directory.

    Raises BadInput for another directory, IntegrityFailure if its manifest or summary cannot be read. Any other file
    that is missing or damaged, and any record that is refused, becomes a Problem.
    """
    directory = directory.resolve()
    if not directory.is_dir():
        raise BadInput(f"{directory} is not a directory")
    if not (directory / SUMMARY).is_file():
        raise BadInput(f"{directory} is not a reproduction: it has no {SUMMARY}")
    manifest = read_document(RunDirectory.open(directory).path / MANIFEST, Manifest)
    summary = read_document(directory / SUMMARY, ReproductionSummary)
    problems = Problems()
    if is_sealed(directory):
        try:
            check_seal(directory)
        except IntegrityFailure as error:
            problems.add(MARKER, f"{str(error).replace(f'{directory}/', '')}.")
    else:
        problems.add(MARKER, "This run has not finished; the page shows what it has so far.", damaged=False)
    records = _read_records(directory / RECORDS, {model.run for model in summary.models}, problems)
    ledger = problems.document(directory / LEDGER, Ledger, LEDGER, "The data ledger")
    if not (directory / LEDGER).is_file():
        problems.add(LEDGER, f"This reproduction has no data ledger ({LEDGER}).", damaged=False)
    card = problems.document(directory / DATASET, DataCard, DATASET, "The data card")
    scores = problems.document(directory / SCORES, ReproductionScores, SCORES, "Bits per byte with intervals")
    evaluations: dict[str, Result] = {}
    with problems.noting(EVALUATIONS, "The evaluations"):
        for name, values in read_evaluations(directory).items():
            with problems.noting(EVALUATIONS, "An evaluation"):
                evaluations[name] = parse_document(values, Result, f"{name} in {EVALUATIONS}")
    return Reproduction(
        directory, manifest, read_digest(directory) if is_sealed(directory) else None, summary, tuple(records), ledger,
        card, scores, evaluations, problems,
    )  # fmt: skip


def _read_records(path: Path, known_runs: set[str], problems: Problems) -> list[Record]:
    """The records with a source; a number that was not published also needs a digest or a run that is known."""
    if not path.is_file():
        problems.add(RECORDS, f"This reproduction has no result records ({RECORDS}).", damaged=False)
        return []
    try:
        records = read_records(path)
    except BadInput as error:
        problems.add(RECORDS, f"The result records cannot be shown: {str(error).replace(f'{path.parent}/', '')}.")
        return []
    if not records:
        problems.add(RECORDS, f"The result records ({RECORDS}) are empty.", damaged=False)
    proven = []
    for number, record in enumerate(records, 1):
        left_out = f"Line {number} of {RECORDS} is left out:"
        if not record.source.strip():
            problems.add(RECORDS, f"{left_out} it has no source.")
        elif record.kind != "published" and not record.digest and record.source not in known_runs:
            problems.add(RECORDS, f"{left_out} {record.source} has no digest and is not a run of this reproduction.")
        else:
            proven.append(record)
    return proven
