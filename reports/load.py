"""The files of a reproduction as typed values, with a sentence for each that is unusable."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.files import DATASET, LEDGER, DataCard, Ledger
from engine.run.files import SUMMARY
from evaluation.schema import Result
from experiments.files import EVALUATIONS, SCORES, TRAINING, ReproductionScores
from experiments.reproduce.files import ReproductionSummary
from lineage.atomic import parse_json
from lineage.digest import MARKER, is_sealed, read_digest, sealed_files, sha256_file, sha256_json
from lineage.errors import BadInput
from lineage.files import Manifest, one_line, read_document
from lineage.records import RECORDS, Kind, Record
from lineage.run import MANIFEST, RunDirectory
from reports.files import Problem, Problems


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
    problems: tuple[Problem, ...]

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.directory.name

    @property
    def own_kind(self) -> Kind:
        """The kind of the numbers that this reproduction made."""
        return "scaled" if self.summary.mode == "scaled" else "measured"

    @property
    def sizes(self) -> dict[str, int]:
        """Parameters of the model that was trained in each published model's name."""
        return {each.series: each.trained.parameters for each in self.summary.models if each.trained.parameters}

    def command(self, *names: str) -> str:
        """The command that makes the numbers of the first known name again; empty if the summary has none."""
        commands = self.summary.commands
        keys = [key for name in names for key in (name, f"2019/{name}") if key in commands]
        return commands[keys[0]] if keys else ""

    def problems_of(self, part: str) -> list[str]:
        """Problems of one file."""
        return [problem.sentence for problem in self.problems if problem.part == part]

    def select(self, experiment: str, *quantities: str) -> list[Record]:
        """Records of a published table or figure in file order, of all quantities or of the named ones."""
        return [
            record
            for record in self.records
            if record.experiment == experiment and (not quantities or record.quantity in quantities)
        ]


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
    problems = Problems(_seal_problems(directory))
    records = _read_records(directory / RECORDS, {model.run for model in summary.models}, problems)
    ledger = problems.document(directory / LEDGER, Ledger, LEDGER, "The data ledger")
    if not (directory / LEDGER).is_file():
        problems.add(LEDGER, f"This reproduction has no data ledger ({LEDGER}).", damaged=False)
    card = problems.document(directory / DATASET, DataCard, DATASET, "The data card")
    scores = problems.document(directory / SCORES, ReproductionScores, SCORES, "Bits per byte with intervals")
    evaluations = {
        path.stem: evaluation
        for path in sorted((directory / EVALUATIONS).glob("*.json"))
        if (evaluation := problems.document(path, Result, EVALUATIONS, "An evaluation"))
    }
    return Reproduction(
        directory,
        manifest,
        read_digest(directory) if is_sealed(directory) else None,
        summary,
        tuple(records),
        ledger,
        card,
        scores,
        evaluations,
        tuple(problems),
    )


def refusal(record: Record, known_runs: set[str]) -> str | None:
    """Reason to refuse a record, or None.

    Every record needs a source; a number that was not published also needs a digest or a run that the summary lists.
    """
    if not record.source.strip():
        return "it has no source"
    if record.kind != "published" and not record.digest and record.source not in known_runs:
        return f"{record.source} has no digest and is not a run of this reproduction"
    if record.quantity.endswith("perplexity") and record.value <= 0:
        return f"a perplexity of {record.value:g} is impossible"
    return None


def _read_records(path: Path, known_runs: set[str], problems: Problems) -> list[Record]:
    def accept(line: bytes) -> Record:
        try:
            record = Record.model_validate(parse_json(line))
        except ValueError as error:
            raise BadInput(f"it is not a record ({one_line(error)})") from error
        if refused := refusal(record, known_runs):
            raise BadInput(refused)
        return record

    if not path.is_file():
        problems.add(RECORDS, f"This reproduction has no result records ({RECORDS}).", damaged=False)
        return []
    lines = path.read_bytes().splitlines()
    if not lines:
        problems.add(RECORDS, f"The result records ({RECORDS}) are empty.", damaged=False)
    return problems.lines(RECORDS, RECORDS, lines, accept)


def _seal_problems(directory: Path) -> Iterator[Problem]:
    """Compare the page's input files with the completion marker."""
    if not is_sealed(directory):
        yield Problem(MARKER, "This run has not finished; the page shows what it has so far.", damaged=False)
        return
    files = sealed_files(directory)
    if sha256_json(files) != read_digest(directory):
        yield Problem(MARKER, "The completion marker was edited: its digest does not match.", damaged=True)
    paths = [*(directory / EVALUATIONS).glob("*.json"), *(directory / TRAINING).glob("*/*.json*")]
    present = {str(path.relative_to(directory)) for path in paths}
    folders = (f"{EVALUATIONS}/", f"{TRAINING}/")
    nested = sorted(present | {name for name in files if name.startswith(folders)})
    for name in (MANIFEST, SUMMARY, RECORDS, LEDGER, DATASET, SCORES, *nested):
        path, expected = directory / name, files.get(name)
        if path.is_file() and (expected is None or sha256_file(path) != expected.get("sha256")):
            yield Problem(MARKER, f"{name} is not the file that was sealed when the run finished.", damaged=True)
        elif expected is not None and not path.is_file():
            yield Problem(MARKER, f"{name} was there when the run finished and is missing now.", damaged=True)
