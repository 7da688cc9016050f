"""Kept results held against what makes them: numbers made again here, verdicts given again, figures drawn again."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mlm_repro.experiments.catalogue import ABLATION, TAKES_LONG, Experiment, load_experiments
from mlm_repro.experiments.files import VERDICTS, Mutations
from mlm_repro.experiments.mutation import mutate
from mlm_repro.experiments.runner import measure, run_experiment
from mlm_repro.experiments.sealed import Line
from mlm_repro.experiments.verdicts import load_results, parts_of
from mlm_repro.lineage.digest import check_seal, is_sealed
from mlm_repro.lineage.errors import DataMissing
from mlm_repro.lineage.files import read_document, unlike
from mlm_repro.lineage.records import RECORDS, Record, read_records
from mlm_repro.lineage.run import MANIFEST
from mlm_repro.reports.engines import engines_exhibit
from mlm_repro.reports.experiment_runs import LADDER, kind_of
from mlm_repro.reports.ladder import ladder_exhibit
from mlm_repro.reports.render import export_exhibit
from mlm_repro.verify.recomputed import RunCheck

ROUNDING = {"largest_logit_difference": 3}
"""Digits after the point of quantities that another processor rounds otherwise."""


class KeptCheck:
    """Differences between kept results and what is made again of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.broken: list[str] = []
        self.compared: Counter[str] = Counter()
        """How many records, verdicts and figures were made again."""
        self.left: list[str] = []
        """Sentences on what was not made again, with what it needs."""
        self.runs = [path.parent for path in sorted(folder.rglob(MANIFEST)) if is_sealed(path.parent)]
        for run in self.runs:
            check_seal(run)
            self.broken += RunCheck(run).broken
            self.broken += self._numbers(run)
        self.broken += [*self._verdicts(), *self._figures()]

    def _numbers(self, run: Path) -> Iterator[str]:
        """Make a run's records again where that takes no training and no time."""
        for part in parts_of(run) if (run / RECORDS).is_file() else ():
            manifest, experiment = part.manifest, None
            if manifest["kind"] == "experiment":
                experiment = load_experiments().get(manifest["config"]["experiment"]["name"])
            if experiment is None:
                what = "curves" if manifest["kind"] in ("ladder", ABLATION) else "evaluations"
                self.left.append(f"{part.name}: its numbers follow from its kept {what}, which need its trainings")
                continue
            try:
                made = self._make(experiment, str(manifest["config"].get("mode")))
            except DataMissing as missing:
                self.left.append(f"{part.name}: {missing}")
                continue
            self.compared["records"] += len(part.records)
            says, gives = (
                {
                    f"{x.series} {x.quantity} ({x.kind}) at {x.x}": round(x.value, ROUNDING.get(x.quantity, 99))
                    for x in records
                }
                for records in (part.records, made)
            )
            yield from unlike(part.name, says, gives, "made again it is")

    def _make(self, experiment: Experiment, mode: str) -> list[Record]:
        if mode == "simulate":
            with tempfile.TemporaryDirectory() as folder:
                return read_records(run_experiment(experiment, Path(folder))[0].path / RECORDS)
        if experiment.measures in TAKES_LONG:
            raise DataMissing(f"it {TAKES_LONG[experiment.measures]}")
        about: Line = {"experiment": experiment.name, "source": ""}
        return [Record(**about | line) for line in measure(experiment)]

    def _verdicts(self) -> Iterator[str]:
        """Give the verdicts again and compare them, claims and tolerances included, with those that are kept."""
        for path in sorted(self.folder.rglob(VERDICTS)):
            before, again = read_document(path, Mutations), mutate(load_results([path.parent]))
            says, gives = (
                {**file.claims, **{f"the verdict on {row.claim}": str(row) for row in file.rows}}
                for file in (before, again)
            )
            self.compared["verdicts"] += len(before.rows)
            self.compared["claims"] += len(before.claims)
            yield from unlike(path.name, says, gives)

    def _figures(self) -> Iterator[str]:
        """Draw the kept figures of the ladder and of two engines again."""
        drawn = [ladder_exhibit(run) for run in self.runs if kind_of(run) == LADDER]
        drawn += [replace(engines_exhibit(run), name="engines") for run in self.runs if "-tp2-" in run.name]
        for exhibit in drawn:
            path = self.folder / "figures" / f"{exhibit.name}.svg"
            if path.is_file():
                with tempfile.TemporaryDirectory() as folder:
                    again = export_exhibit([exhibit], exhibit.name, "svg", Path(folder))
                    self.compared["figures"] += 1
                    if again.read_bytes() != path.read_bytes():
                        yield f"figures/{path.name} is not what the kept runs give"
