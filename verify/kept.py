"""A folder of runs: each held against what it was made of, and its verdicts and figures made again."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mlm_repro.experiments.files import VERDICTS, Mutations
from mlm_repro.experiments.mutation import mutate
from mlm_repro.experiments.verdicts import load_results
from mlm_repro.lineage.digest import is_sealed
from mlm_repro.lineage.files import read_document, unlike
from mlm_repro.lineage.run import MANIFEST
from mlm_repro.reports.engines import engines_exhibit
from mlm_repro.reports.experiment_runs import LADDER, kind_of
from mlm_repro.reports.ladder import ladder_exhibit
from mlm_repro.reports.render import export_exhibit
from mlm_repro.verify.recomputed import Findings


class KeptCheck(Findings):
    """Differences between kept results and what is made again of them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(at_length=True)
        self.folder = folder
        begun = [path.parent for path in sorted(folder.rglob(MANIFEST)) if "/." not in f"/{path.relative_to(folder)}"]
        self.runs = [run for run in begun if is_sealed(run)]
        self.absent = [f"{run.name}, which is not sealed" for run in begun if not is_sealed(run)]
        for run in self.runs:
            self.check(run)
        self.broken += [*self._verdicts(), *self._figures()]

    def _verdicts(self) -> Iterator[str]:
        """Give the verdicts again and compare them, claims and tolerances included, with those that are kept."""
        for path in sorted(self.folder.rglob(VERDICTS)):
            before, again = read_document(path, Mutations), mutate(load_results([path.parent]))
            says, gives = (
                {**file.claims, **{f"the verdict on {row.claim}": str(row) for row in file.rows}}
                for file in (before, again)
            )
            self.counted["verdicts"] += len(before.rows)
            self.counted["claims"] += len(before.claims)
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
                    self.counted["figures"] += 1
                    if again.read_bytes() != path.read_bytes():
                        yield f"figures/{path.name} is not what the kept runs give"
