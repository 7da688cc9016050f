"""A reproduction directory as typed values, with a sentence for everything that could not be used."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lineage.config import parse_config
from lineage.data_files import DataCard, Ledger
from lineage.digest import MARKER, is_sealed, read_digest, sealed_files, sha256_file, sha256_json
from lineage.errors import BadInput, UserError
from lineage.files import ReproductionSummary, one_line, read_document
from lineage.records import Record
from lineage.run import MANIFEST, RunDirectory
from reports.evaluations import EVALUATIONS, Evaluation, load_evaluations
from reports.files import Problem
from reports.kept_examples import EXAMPLES, Examples, read_examples
from reports.training_runs import Training, read_training

SUMMARY, RECORDS, LEDGER, DATASET = "summary.json", "records.jsonl", "ledger.json", "dataset.json"
TRAINING = "training"


@dataclass(frozen=True)
class Reproduction:
    """Everything a page is made from."""

    directory: Path
    manifest: dict[str, Any]
    digest: str | None
    """The run's digest; None for a run that has not been completed."""
    summary: ReproductionSummary
    records: tuple[Record, ...]
    ledger: Ledger | None
    card: DataCard | None
    evaluations: dict[str, Evaluation]
    """By file stem."""
    trainings: dict[str, Training]
    """What is kept of the runs, by model."""
    examples: Examples
    problems: tuple[Problem, ...]

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.directory.name

    def problems_of(self, part: str) -> list[str]:
        """Sentences about one file."""
        return [problem.sentence for problem in self.problems if problem.part == part]

    def select(self, experiment: str, *quantities: str) -> list[Record]:
        """Records of a published table or figure, in file order; all quantities unless some are named."""
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

    Raises BadInput if it is not one, IntegrityFailure if its manifest or summary cannot be read. Any other file that
    is missing or damaged, and any record that is refused, becomes a Problem.
    """
    directory = directory.resolve()
    if not directory.is_dir():
        raise BadInput(f"{directory} is not a directory")
    if not (directory / SUMMARY).is_file():
        raise BadInput(f"{directory} is not a reproduction: it has no {SUMMARY}")
    manifest = RunDirectory.open(directory).manifest
    summary = read_document(directory / SUMMARY, ReproductionSummary)
    problems = list(_seal_problems(directory))
    records, refused = _read_records(directory / RECORDS, {model.run for model in summary.models})
    problems += refused
    ledger = None
    if (directory / LEDGER).is_file():
        try:
            ledger = read_document(directory / LEDGER, Ledger)
        except UserError as error:
            problems.append(Problem(LEDGER, f"The data ledger cannot be shown: {error}.", damaged=True))
    else:
        problems.append(Problem(LEDGER, f"This reproduction has no data ledger ({LEDGER}).", damaged=False))
    card = None
    if (directory / DATASET).is_file():
        try:
            card = read_document(directory / DATASET, DataCard)
        except UserError as error:
            problems.append(Problem(DATASET, f"The data card cannot be shown: {error}.", damaged=True))
    evaluations, unreadable = load_evaluations(directory)
    problems += unreadable
    folders = {model.name: directory / TRAINING / model.name for model in summary.models}
    trainings = {name: read_training(folder, name) for name, folder in folders.items() if folder.is_dir()}
    problems += [problem for training in trainings.values() for problem in training.problems]
    examples = read_examples(directory)
    problems += examples.problems
    return Reproduction(
        directory,
        manifest,
        read_digest(directory) if is_sealed(directory) else None,
        summary,
        tuple(records),
        ledger,
        card,
        evaluations,
        trainings,
        examples,
        tuple(problems),
    )


def refusal(record: Record, known_runs: set[str]) -> str | None:
    """Why a record may not be shown, or None.

    Provenance is a source and, for a number that was not published, a digest or a run that the summary lists.
    """
    if not record.source.strip():
        return "it has no source"
    if record.kind != "published" and not record.digest and record.source not in known_runs:
        return f"{record.source} has no digest and is not a run of this reproduction"
    if record.quantity.endswith("perplexity") and record.value <= 0:
        return f"a perplexity of {record.value:g} is impossible"
    return None


def _read_records(path: Path, known_runs: set[str]) -> tuple[list[Record], list[Problem]]:
    if not path.is_file():
        return [], [Problem(RECORDS, f"This reproduction has no result records ({RECORDS}).", damaged=False)]
    records: list[Record] = []
    problems: list[Problem] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            record = parse_config(json.loads(line), Record, f"line {number}")
            reason = refusal(record, known_runs)
        except (ValueError, UserError, RecursionError) as error:
            reason = f"it is not a record ({one_line(error)})"
        if reason is None:
            records.append(record)
        else:
            sentence = f"Line {number} of {RECORDS} is left out: {reason}."
            problems.append(Problem(RECORDS, sentence, damaged=True))
    if not records and not problems:
        problems.append(Problem(RECORDS, f"The result records ({RECORDS}) are empty.", damaged=False))
    return records, problems


def _seal_problems(directory: Path) -> Iterator[Problem]:
    """Compare the files that the page reads with the completion marker."""
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
    for name in (MANIFEST, SUMMARY, RECORDS, LEDGER, DATASET, EXAMPLES, *nested):
        path, expected = directory / name, files.get(name)
        if path.is_file() and (expected is None or sha256_file(path) != expected.get("sha256")):
            yield Problem(MARKER, f"{name} is not the file that was sealed when the run finished.", damaged=True)
        elif expected is not None and not path.is_file():
            yield Problem(MARKER, f"{name} was there when the run finished and is missing now.", damaged=True)
