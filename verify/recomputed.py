"""Check a run: every file of it against what it is made of, in one loop. Imports no torch.

If somebody edits files and seals them anew, the other files of the run, and the runs it was made of, contradict it.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mlm_repro.lineage.chain import broken_links
from mlm_repro.lineage.derived import Checked, unlike
from mlm_repro.lineage.digest import is_sealed
from mlm_repro.lineage.errors import UserError
from mlm_repro.lineage.files import Manifest, one_line, parse_document, read_document, read_object
from mlm_repro.lineage.run import MANIFEST
from mlm_repro.lineage.verified import check_seal_once
from mlm_repro.reports.report import REPORT
from mlm_repro.verify.kinds import KINDS, Kind, hidden, misfits

FORMER = {"english", "expected_candidate_precision", "matrix_gflops"}
"""Keys that earlier versions wrote into documents."""


class RunCheck:
    """Checks a run, and recursively every input on disk."""

    def __init__(self, run: Path) -> None:
        self.run = Checked(run, read_document(run / MANIFEST, Manifest), [])
        self.absent = self.run.absent
        """Names of what belongs to it and is not on disk."""
        self.broken: list[str] = []
        """A sentence for each difference."""
        self.compared: list[str] = []
        """Names of what was compared."""
        kind = KINDS.get(self.run.manifest.kind)
        if kind is None:
            self.broken.append(f"{run.name} is of the kind {self.run.manifest.kind!r}, of which nothing is known")
            return
        self._note(lambda: self._identity(kind))
        self._note(lambda: self._inputs(kind))
        for derive in kind.derived:
            self._note(lambda derive=derive: self._unlike(derive(self.run)))  # type: ignore[misc]

    def _note(self, differences: Callable[[], Iterable[str]]) -> None:
        """Add the differences, and a sentence where they cannot be found out."""
        try:
            self.broken += differences()
        except (UserError, OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {one_line(error)}"
            said = f"{error} is missing" if isinstance(error, KeyError) else said
            self.broken.append(f"{self.run.path.name} cannot be checked: {said}")

    def _unlike(self, files: Iterable[tuple[str, Any, Any]]) -> Iterator[str]:
        """Compare what files say with what they are made of."""
        for file, said, made in files:
            yield from unlike(file, said, made)
            self.compared += {re.split("[:,]| of ", file)[0]} - {*self.compared}

    def _identity(self, kind: Kind) -> Iterator[str]:
        """Compare files, keys and name with those of the kind, and checkpoints with each other."""
        run = self.run.path
        yield from misfits(run, kind, read_object(run / MANIFEST))
        for name, schema in {MANIFEST: Manifest, **kind.files}.items():
            if schema:
                said = _known(read_object(run / name))
                yield from unlike(f"{name} of {run.name}", said, parse_document(said, schema, name).to_json())
        yield from broken_links(run)
        self.absent += [f"{name} in {run.name}, which no seal covers" for name in hidden(run)]
        self.compared.append("files, keys, name and identity")

    def _inputs(self, kind: Kind) -> Iterator[str]:
        """Compare the digests of inputs that are on disk with the manifest, and check those as runs."""
        for name, place, digest in kind.inputs(self.run):
            if not digest and not is_sealed(place):
                if not name:
                    yield f"{REPORT} was made of {place.name}, which is not there"
                self.absent.append(f"{name} ({place.name})")
                continue
            if name and digest != self.run.manifest.parents.get(name):
                yield f"{self.run.path.name} was not made of {place.name} as it is here: its digest differs"
            check_seal_once(place)
            other = RunCheck(place)
            self.absent += other.absent
            yield from other.broken
            self.compared += [place.name]


def _known(value: Any) -> Any:
    """A value without the keys that earlier versions wrote."""
    if isinstance(value, dict):
        return {key: _known(inner) for key, inner in value.items() if key not in FORMER}
    return [_known(inner) for inner in value] if isinstance(value, list) else value
