"""A dataset as Croissant 1.0: its files, and its documents as records.

https://docs.mlcommons.org/croissant/docs/croissant-spec-1.0.html
"""

import os
from pathlib import Path

from lineage.atomic import write_json
from lineage.data_files import DataCard, Ledger
from lineage.errors import BadInput
from lineage.files import read_document, read_object
from reports.exports.sealed_run import Json, SealedRun
from reports.load import DATASET, LEDGER

DOCUMENTS = "documents/"
CONTEXT = read_object(Path(__file__).with_name("croissant_context.json"))
"""As the specification has it."""


def write_croissant(run: SealedRun, out: Path) -> None:
    """A JSON-LD file with the ledger's counts, whose paths to the dataset's files are relative to it.

    Raises BadInput for a run that is no dataset.
    """
    if run.manifest.kind != "data":
        raise BadInput(f"{run.path} is a {run.manifest.kind} run: Croissant describes a dataset of `mlm-data run`")
    folder = os.path.relpath(run.path, out.resolve().parent)
    description = {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": read_document(run.path / DATASET, DataCard).name,
        "description": _account(read_document(run.path / LEDGER, Ledger)),
        "identifier": f"sha256:{run.digest}",
        "dateCreated": run.manifest.created,
        "distribution": [
            {
                "@type": "cr:FileObject",
                "@id": file.name,
                "name": file.name,
                "contentUrl": f"{folder}/{file.name}",
                **file.facts,
            }
            for file in run.files
        ],
        "recordSet": [_record_set(file.name) for file in run.files if file.name.startswith(DOCUMENTS)],
    }
    write_json(out, description)


def _record_set(file: str) -> Json:
    """The documents of a split."""
    split = Path(file).stem
    fields = [
        {
            "@type": "cr:Field",
            "@id": f"{split}/{column}",
            "name": column,
            "dataType": "sc:Text",
            "source": {"fileObject": {"@id": file}, "extract": {"column": column}},
        }
        for column in ("id", "text")
    ]
    return {"@type": "cr:RecordSet", "@id": split, "name": split, "field": fields}


def _account(ledger: Ledger) -> str:
    """What the ledger says of the stages that changed the number of documents, and of each split."""
    parts = [f"{ledger.source}.", f"{ledger.stages[0].documents_in:,} documents came in."]
    for stage in ledger.stages:
        reasons = ", ".join(f"{amount.documents:,} {reason}" for reason, amount in stage.dropped.items())
        dropped = f" (dropped: {reasons})" if reasons else ""
        if stage.documents_out != stage.documents_in:
            parts.append(f"After {stage.name} there were {stage.documents_out:,}{dropped}.")
    for split, amount in ledger.splits.items():
        tokens = "" if amount.tokens is None else f", {amount.tokens:,} tokens"
        parts.append(f"Split {split}: {amount.documents:,} documents{tokens}.")
    return " ".join(parts)
