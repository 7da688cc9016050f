"""The files of a complete reproduction as typed values."""

from dataclasses import dataclass
from pathlib import Path

from mlm_repro.data_pipeline.files import DATASET, LEDGER, DataCard, Ledger
from mlm_repro.engine.run.files import SUMMARY
from mlm_repro.evaluation.schema import Result
from mlm_repro.experiments.files import EVALUATIONS, SCORES, ReproductionScores, read_evaluations
from mlm_repro.experiments.reproduce.files import ReproductionSummary
from mlm_repro.lineage.digest import check_seal, is_sealed
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.files import Manifest, parse_document, read_document
from mlm_repro.lineage.records import RECORDS, Kind, Record, read_records
from mlm_repro.lineage.run import MANIFEST, RunDirectory


@dataclass(frozen=True)
class Reproduction:
    """Complete reproduction, as `load_reproduction` reads it from its directory: its manifest,
    summary and records; the `ledger` and the `card` of its data; `evaluations`, a dict of results
    by model and protocol, such as `8.3b-lambada`; and `scores`, the differences between its models,
    or None if an earlier version made the run."""

    directory: Path
    manifest: Manifest
    digest: str
    """Digest of the directory, as `check_seal` returns it."""
    summary: ReproductionSummary
    records: tuple[Record, ...]
    ledger: Ledger
    card: DataCard
    scores: ReproductionScores | None
    """Paired differences between the models on the same text, from scores.json; None if an earlier
    version made the run."""
    evaluations: dict[str, Result]
    """Name of a model and protocol, with a hyphen between them → result."""

    @property
    def name(self) -> str:
        """Name of the reproduction's directory."""
        return self.directory.name

    @property
    def own_kind(self) -> Kind:
        """Kind of the numbers that this reproduction made: "scaled" if it trained scaled twins,
        else "measured"."""
        return "scaled" if self.summary.mode == "scaled" else "measured"

    @property
    def stands_in(self) -> bool:
        """True if texts held out from the run's own data stand in for the published test sets, as
        its records say."""
        return any(record.quantity.startswith("heldout_") for record in self.select("2019/table-3"))

    @property
    def order(self) -> list[str]:
        """List of the names of all series: the models of the summary, from the smallest, then the
        other series of the records by name."""
        named = dict.fromkeys(model.series for model in self.summary.models)
        return list(named | dict.fromkeys(sorted(record.series for record in self.records)))

    @property
    def command(self) -> str:
        """Command line that reproduces this reproduction's numbers, the first of the summary's;
        empty if it has none."""
        return next(iter(self.summary.commands.values()), "")

    def select(self, experiment: str, *quantities: str) -> list[Record]:
        """Return a list of this reproduction's records of the published table or figure
        `experiment`, such as "2019/table-3", in file order; empty if there are no such records.
        Each further argument names a quantity, and then other quantities are left out."""
        return [
            record
            for record in self.records
            if record.experiment == experiment and (not quantities or record.quantity in quantities)
        ]


def newest_reproduction(runs: Path) -> Path:
    """Return the path of the complete `reproduce-*` directory in the folder `runs` that was begun
    last; links are passed over. Raises BadInput if no reproduction is complete, IntegrityFailure if
    the manifest of a complete one is damaged."""
    reproductions = [
        path for path in sorted(runs.glob("reproduce-*")) if path.is_dir() and not path.is_symlink()
    ]
    complete = [path for path in reproductions if is_sealed(path)]
    if not complete:
        unfinished = f" ({len(reproductions)} unfinished)" if reproductions else ""
        raise BadInput(
            f"there is no complete reproduction (reproduce-*) in the folder {runs}{unfinished}:"
            " name the folder that has one, or make one with `mlm-experiment reproduce`"
        )
    return max(complete, key=lambda path: str(RunDirectory(path).manifest.get("created", "")))


def load_reproduction(directory: Path) -> Reproduction:
    """Read the directory of a reproduction, check its seal and the origin of every number, and
    return it as a Reproduction.

    Raises BadInput if the directory holds another kind of run or an unfinished one, or if its file
    of records is missing or has a line that is no record. Raises IntegrityFailure if it was changed
    after it was sealed, if another file cannot be read, or if a number has no source, or is neither
    published nor has a digest or a run of this reproduction.
    """
    directory = directory.resolve()
    manifest = read_document(RunDirectory.open(directory, "reproduction").path / MANIFEST, Manifest)
    if not is_sealed(directory):
        raise BadInput(
            f"the reproduction {directory} has not finished: give the command that began it again,"
            " which continues it and makes its page at the end"
        )
    digest = check_seal(directory)
    summary = read_document(directory / SUMMARY, ReproductionSummary)
    records = read_records(directory / RECORDS)
    runs = {model.run for model in summary.models}
    for number, record in enumerate(records, 1):
        is_proven = record.kind == "published" or record.digest or record.source in runs
        if not (is_proven and record.source.strip()):
            raise IntegrityFailure(
                f"line {number} of {RECORDS} in {directory} has no source, or its source"
                f" {record.source!r} is no run of this reproduction and it has no digest:"
                " make a new reproduction"
            )
    results = {
        name: parse_document(values, Result, f"{name} in {EVALUATIONS}")
        for name, values in read_evaluations(directory).items()
    }
    scores = (
        read_document(directory / SCORES, ReproductionScores)
        if (directory / SCORES).is_file()
        else None
    )
    return Reproduction(
        directory,
        manifest,
        digest,
        summary,
        tuple(records),
        read_document(directory / LEDGER, Ledger),
        read_document(directory / DATASET, DataCard),
        scores,
        results,
    )
