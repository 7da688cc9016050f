"""Descriptions of a complete run in the formats that other programs read."""

from pathlib import Path

from lineage.command import NO_DISK
from lineage.digest import check_seal, is_sealed
from lineage.errors import BadInput
from lineage.files import Manifest, read_document
from lineage.run import MANIFEST, RunDirectory
from reports.exports.croissant import write_croissant
from reports.exports.every_eval_ever import write_evaluations

FORMS = {
    "croissant": ("croissant.json", write_croissant),
    "every-eval-ever": ("every-eval-ever", write_evaluations),
}
"""Ending of the default place and writer of each format, by name."""


def export(path: Path, form: str, out: Path | None) -> Path:
    """Describe a run in a format of FORMS and return the place: `out`, or the run's path with the format's ending.

    Raises BadInput if there is no run or the format cannot describe it, or if `out` exists, cannot be written or lies
    in a sealed directory. Raises IntegrityFailure if the run is incomplete or damaged.
    """
    run = RunDirectory.open(path).path
    digest = check_seal(run)
    ending, write = FORMS[form]
    out = out or run.parent / f"{run.name}-{ending}"
    if out.exists():
        raise BadInput(f"{out} exists already: name a new place")
    if parent := next((parent for parent in out.resolve().parents if is_sealed(parent)), None):
        raise BadInput(f"{out} would lie in {parent}, which is complete: name another place")
    try:
        write(run, read_document(run / MANIFEST, Manifest), digest, out)
    except OSError as error:
        if error.errno in NO_DISK:
            raise
        raise BadInput(f"{out} cannot be written: {error.strerror}") from error
    return out
