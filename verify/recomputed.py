"""Check a directory against its inputs: its numbers, sums and page are computed again and compared.
Imports no torch.

If somebody edits files and seals them anew, the other files of the run, and the runs it was made
of, contradict it. Rooms declare how the files of each kind follow (`KINDS`); one loop computes
them.
"""

import tempfile
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path

from mlm_repro.data_pipeline import remade as of_data
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.run import remade as of_engine
from mlm_repro.experiments import remade as of_experiments
from mlm_repro.experiments.benchmark import AGAINST, COMPARED, share_of
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.chain import CHECKPOINTS, broken_links
from mlm_repro.lineage.digest import MARKER, is_sealed, read_digest, sha256_file
from mlm_repro.lineage.errors import UserError
from mlm_repro.lineage.files import (
    Absent,
    Comparisons,
    Manifest,
    Parent,
    Remade,
    as_said,
    misread,
    one_line,
    read_document,
    read_object,
    unlike,
)
from mlm_repro.lineage.kinds import NAME, Kind, differing, hidden, misfits, parts_within
from mlm_repro.lineage.records import RECORDS, read_records, records_bytes
from mlm_repro.lineage.run import MANIFEST
from mlm_repro.lineage.verified import check_seal_once
from mlm_repro.reports.engines import read_engines

REPORT = "report"
FOLDER = "folder of runs"


class RunCheck:
    """Check of a run, of a sealed directory within one or of a folder of runs, and of every input
    that this run, directory or folder has on disk, recursively; the constructor makes the check.
    The results are lists: `broken`, sentences on differences; `absent`, names of inputs that are
    not on this machine; `left`, sentences on results that were not computed again; and `compared`,
    names of the comparisons."""

    def __init__(self, place: Path, seen: set[Path] | None = None) -> None:
        """Make every comparison that is declared for the kind of the directory `place`: a run, a
        sealed directory within one, or a folder of runs. The results are attributes of the new
        RunCheck, lists such as `broken`, which has a sentence for each difference. The seal of
        `place` itself is not checked. Directories in `seen` were checked on the way here and are
        skipped; this one is added to them. An error of a comparison and an unknown kind become
        sentences in `broken`; a manifest that cannot be read raises IntegrityFailure."""
        self.place = place
        self.seen = seen if seen is not None else set()
        self.broken: list[str] = []
        """A sentence for each difference."""
        self.absent: list[str] = []
        """Names of inputs, and of other things to compare with, that are not on this machine."""
        self.left: list[str] = []
        """A sentence for each result that was not computed again, with the reason."""
        self.compared: list[str] = []
        """Names of the comparisons that were made."""
        self.manifest = (
            read_document(place / MANIFEST, Manifest) if (place / MANIFEST).is_file() else None
        )
        is_folder = not (self.manifest or self.seen or is_sealed(place))
        if is_folder:
            self.word = FOLDER
        else:
            self.word = self.manifest.kind if self.manifest else kind_of(place)
        self.kind = KINDS.get(self.word)
        # Inputs may be shared, or lead in a circle: each is checked once.
        self.seen.add(place.resolve())
        if not self.kind:
            self.broken.append(f"{place} is of an unknown kind: {self.word!r}")
            return
        for part in self.kind.made if is_folder else (self.files, *self.kind.made):
            try:
                for comparison in part(place):
                    self._note(comparison)
                self.compared.append(
                    part.__name__ if part != self.files else f"files and keys of a {self.word}"
                )
            except Exception as error:  # what was made to mislead may raise anything
                reason = (
                    str(error)
                    if isinstance(error, UserError)
                    else f"{type(error).__name__}: {one_line(error)}"
                )
                if isinstance(error, KeyError):
                    reason = f"{error} is missing"
                self.broken.append(f"{place.name} cannot be checked: {reason}")

    def _note(self, comparison: str | Remade | Absent | Parent) -> None:
        match comparison:
            case Remade():
                self.broken += unlike(*comparison)
            case Absent():
                (self.absent if comparison.ever else self.left).append(comparison.name)
            case Parent():
                self._follow(comparison)
            case str():
                self.broken.append(comparison)

    def _follow(self, parent: Parent) -> None:
        """Check the directory of `parent`, which the run was made of or which lies in it. An input
        that the manifest names and that is not here is added to `absent`, and nothing more of it is
        checked. A sentence is added to `broken` if an input's digest is not the recorded one, or if
        the input is younger than the run. Then, unless that was done before, the seals of the
        directory are checked, and the directory as a run, with everything that it was made of; the
        results are added to this check. A broken seal raises IntegrityFailure."""
        name = parent.name
        place = parent.place
        made = self.manifest
        if name and made:
            if not is_sealed(place):
                self.absent.append(f"{name} ({place.name})")
                return
            if parent.digest_of(place) != made.parents.get(name):
                self.broken.append(
                    f"{self.place.name} was not made of {place.name} as it is here: the digest that"
                    " the run recorded is another"
                )
            elif (
                parent.digest_of is read_digest
                and read_object(place / MANIFEST)["created"] > made.created
            ):
                self.broken.append(f"{self.place.name} was created before its input {place.name}")
        # After the digest, which belongs to this run and not to the input.
        if place.resolve() in self.seen:
            return
        for directory in (place, *parts_within(place)):
            if is_sealed(directory):
                check_seal_once(directory)
        other = RunCheck(place, self.seen)
        self.left += other.left
        (self.absent if parent.strictly else self.left).extend(other.absent)
        self.broken += other.broken

    def files(self, place: Path) -> Comparisons:
        """Yield a sentence for each way in which the directory `place` departs from the rules of
        its kind: by a missing, unknown or linked file, by a key in a JSON file or by its own name.
        Yield a Parent for each directory within that the caller checks in turn. Of a run with a
        manifest, also yield a sentence for records in another form than the suite writes, for each
        contradiction within the manifest or among it and the checkpoints, and for a date more than
        a day ahead; and an Absent for each entry that is there but unchecked, because no seal
        covers it: hidden ones, logging libraries' folders."""
        assert self.kind
        values = read_object(place / MANIFEST) if self.manifest else {}
        yield from misfits(place, self.kind, values)
        yield from map(Parent, parts_within(place))
        for name, schema in {**self.kind.files, MANIFEST: Manifest}.items():
            if schema and (path := place / name).is_file():
                yield from misread(read_object(path), schema, f"{name} of {place.name}")
        if not self.manifest:
            return
        path = place / RECORDS
        if path.is_file() and records_bytes(read_records(path)) != path.read_bytes():
            yield f"{RECORDS} of {place.name} is not written in the form of records, as if edited"
        yield from broken_links(place)
        if not datetime.fromisoformat(self.manifest.created) <= datetime.now(UTC) + timedelta(
            days=1
        ):
            yield f"{place.name} was created {self.manifest.created}, which is in the future"
        yield from (
            Absent(f"{name} in {place.name}, which no seal covers") for name in hidden(place)
        )


def kind_of(place: Path) -> str:
    """Return the kind of the sealed directory `place`, which has no manifest: `checkpoint` if it
    lies in a folder with the name `checkpoints`, else the first of `checkpoint`, `imported
    checkpoint`, `report` and `oracle` whose files, the names in `KINDS`, are all in it. Return an
    empty text if it is of no known kind."""
    if place.parent.name == CHECKPOINTS:
        return "checkpoint"
    has = {path.name for path in place.iterdir()}
    return next((name for name in WITHOUT_MANIFEST if has.issuperset(KINDS[name].files)), "")


def against(run: Path) -> Comparisons:
    """Yield a Remade, a stated value and the one that it must equal, for each part of against.json
    in the directory `run`, the record that compares two engines: its title, setting and notes, with
    the manifest's; its keys, with the ones of its kind; the names of its cases, with `COMPARED`;
    for each of its first three cases the differences and the share of the tolerance, with those
    that the curves give; and the number of disagreements, with that of shares above 1.

    The caller compares the two values. Raises BadInput or IntegrityFailure as `read_engines` does,
    IntegrityFailure also for a manifest that cannot be read.
    """
    result = read_engines(run)
    config = read_document(run / MANIFEST, Manifest).config
    due = {name: config[name] for name in ("title", "setting", "notes")} | {"benchmark": "against"}
    yield as_said(result, due, AGAINST, f"{MANIFEST} says")
    read = result.model_dump(mode="json", exclude_unset=True)
    yield Remade(AGAINST, read_object(run / AGAINST), read, "a file of its kind has")
    names = [case.name for case in result.cases]
    yield Remade(f"{AGAINST}: names of the cases", names, list(COMPARED))
    for case in result.cases[:3]:
        mine, theirs, apart, allowed = (series.samples for series in case.series)
        yield Remade(
            f"{AGAINST}: differences of the {case.name}",
            apart,
            [abs(a - b) for a, b in zip(mine, theirs, strict=True)],
        )
        yield Remade(
            f"{AGAINST}: share of the tolerance in the {case.name}",
            case.ratios,
            [share_of(case.ratios[0].name, apart, allowed)],
        )
    ratios = chain.from_iterable(case.ratios for case in result.cases)
    beyond = sum(ratio.value > 1 for ratio in ratios)
    yield Remade(f"{AGAINST}: number of disagreements", len(result.disagreements), beyond)


def report(run: Path) -> Comparisons:
    """Yield a Parent, which the caller checks in turn, for each run that the report in the
    directory `run` was made of; then build the report anew, and yield a sentence if any file
    differs in a byte.

    A run that is missing or not sealed, or is `run` itself, gives a sentence and ends the
    comparison. Without a report nothing is yielded. Raises the errors of `Inputs.of_built` and
    `assemble`.
    """
    if not (run / REPORT).is_dir():
        return
    # Imported when a report is there: it loads what draws the figures.
    from mlm_repro.reports.page import write_report
    from mlm_repro.reports.report import Inputs, assemble

    inputs = Inputs.of_built(run)
    for path in inputs.runs:
        if not is_sealed(path):
            yield f"{REPORT} was made of {path.name}, which is not here or not sealed"
            return
        if path.resolve() == run.resolve():
            yield f"{REPORT} names the run that it belongs to as its input"
            return
        yield Parent(path, strictly=False)
    with tempfile.TemporaryDirectory() as folder:
        write_report(assemble(inputs), Path(folder))
        made = _digests(Path(folder))
        here = _digests(run / REPORT)
        others = sorted(name for name in made | here if made.get(name) != here.get(name))
        if others:
            yield (
                f"{REPORT}/{others[0]} is not what its inputs give ({len(others)} files are not):"
                f" it was changed, or made by another version or elsewhere; `{inputs.command}`"
                " makes it again"
            )


def _digests(folder: Path) -> dict[str, str]:
    """Return a dict path relative to `folder` → hexadecimal SHA-256 of each file at any depth below
    `folder`. Seals' own files are left out, also the ones in folders within."""
    return {
        str(path.relative_to(folder)): sha256_file(path)
        for path in folder.rglob("*")
        if not path.is_dir() and path.name != MARKER
    }


def runs(folder: Path) -> Comparisons:
    """Yield a Parent, which the caller checks in turn, for each sealed run at any depth below
    `folder`, and an Absent for each unsealed one, in the order of their paths. Hidden folders are
    left out."""
    for run in (
        path.parent
        for path in sorted(folder.rglob(MANIFEST))
        if "/." not in f"/{path.relative_to(folder)}"
    ):
        yield Parent(run) if is_sealed(run) else Absent(f"{run.name}, which is not sealed")


def _settings_of_against(config: JSON) -> JSON:
    recipe = {key: value for key, value in config.items() if key in RunConfig.model_fields}
    return {key: value for key, value in config.items() if key not in recipe} | differing(
        RunConfig, recipe
    )


KINDS = {
    **of_data.KINDS,
    **of_engine.KINDS,
    **of_experiments.KINDS,
    "against": Kind(
        {AGAINST: None},
        name=lambda config: f"against-{NAME}",
        outside=frozenset({"data"}),
        settings=_settings_of_against,
        free=(
            "against.json environment",
            "against.json *.ratios.*.name",
            "against.json *.contender",
            "against.json cases.3.ratios",
            "against.json cases.*.series.3",
        ),
        made=(against,),
    ),
    REPORT: Kind(
        dict.fromkeys(("index.html", "sources.json")), rf"figures/{NAME}\.(csv|svg|pdf|tex)"
    ),
    FOLDER: Kind({}, made=(runs,)),
    "oracle": Kind(dict.fromkeys(("README.md", "table.csv")), "(model|tasks|texts)/.+"),
}
KINDS["reproduction"] = KINDS["reproduction"]._replace(made=(*KINDS["reproduction"].made, report))
"""Kinds of directories, by the word in their manifests or from `kind_of`."""
WITHOUT_MANIFEST = "checkpoint", "imported checkpoint", REPORT, "oracle"
