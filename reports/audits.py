"""What receipts say of a reproduction and its trainings: which segments were trained again, by whom, on what."""

from collections.abc import Sequence
from pathlib import Path

from lineage.digest import MARKER, is_sealed, sha256_file
from lineage.errors import UserError
from lineage.numbers import MISSING
from lineage.receipt import Receipt, read_receipt
from reports.exhibit import Exhibit, Section, Table
from reports.files import Problems
from reports.load import Reproduction
from reports.numbers import printable

PATTERN = "*.receipt.json"
HEADS = ("run", "audit", "found", "segments", "layout", "processor", "torch", "version", "time", "key")


def receipts_beside(reproduction: Path) -> list[Path]:
    """Those in the folder that the reproduction lies in."""
    return sorted(reproduction.resolve().parent.glob(PATTERN))


def audits_section(reproduction: Reproduction, receipts: Sequence[Path], problems: Problems) -> Section | None:
    """A table of the audits of this reproduction and of its models' runs; nothing where there are none."""
    names = {reproduction.name, *(model.run for model in reproduction.summary.models)}
    rows = []
    for path in receipts:
        try:
            receipt = read_receipt(path)
        except UserError as error:
            problems.add(path.name, f"A receipt cannot be shown: {error}.")
            continue
        if receipt.audit.run not in names:
            continue
        run = reproduction.directory.parent / receipt.audit.run
        if is_sealed(run) and sha256_file(run / MARKER) != receipt.subjects.get(MARKER):
            problems.add(path.name, f"The receipt {path.name} is not for {run.name} as it is.")
            continue
        rows.append([printable(cell) for cell in _row(receipt)])
    if not rows:
        return None
    caption = [
        "A segment is the iterations from one checkpoint to the next, trained again and compared bit for bit.",
        "Keys are named as the receipts name them: `mlm-verify receipt` verifies a signature, this page does not.",
    ]
    exhibit = Exhibit("audits", "Audits of the runs", caption, Table(HEADS, rows, 10), tables=(Table(HEADS, rows, 10),))
    return Section("audits-section", "Who has checked what", [exhibit])


def _row(receipt: Receipt) -> list[str]:
    audit = receipt.audit
    segments = ", ".join(f"{each.start + 1}–{each.end}" for each in audit.segments)
    return [
        audit.run,
        audit.verb,
        "; ".join(audit.differs) or "nothing differs",
        f"{len(audit.segments)} of {audit.segments_in_all}: {segments}" if audit.segments else MISSING,
        audit.layout or MISSING,
        audit.numerics.get("processor", MISSING),
        audit.numerics.get("torch", MISSING),
        audit.version,
        audit.created,
        receipt.key[:16] or "not signed",
    ]
