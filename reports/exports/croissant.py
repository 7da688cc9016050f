"""A dataset as Croissant 1.0: its files, and its documents as records.

https://docs.mlcommons.org/croissant/docs/croissant-spec-1.0.html
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_pipeline.files import DATASET, LEDGER, DataCard, Ledger
from lineage.atomic import write_json
from lineage.digest import MARKER, sealed_files, sha256_file
from lineage.errors import BadInput
from lineage.files import Manifest, read_document, read_object

DOCUMENTS = "documents/"
CONTEXT = read_object(Path(__file__).with_name("croissant_context.json"))
"""The context of the specification."""
ENCODINGS = {".json": "application/json", ".jsonl": "application/jsonlines"}
Json = dict[str, Any]


def write_croissant(run: Path, manifest: Manifest, digest: str, out: Path) -> None:
    """Write a JSON-LD file with the ledger's counts and the paths of the dataset's files relative to `out`.

    Raises BadInput for a run that is not a dataset.
    """
    if manifest.kind != "data":
        raise BadInput(f"{run} is a {manifest.kind} run: Croissant describes a dataset of `mlm-data run`")
    files = list(_file_objects(run, os.path.relpath(run, out.resolve().parent)))
    names = [file["name"] for file in files]
    description = {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": read_document(run / DATASET, DataCard).name,
        "description": _account(read_document(run / LEDGER, Ledger)),
        "identifier": f"sha256:{digest}",
        "dateCreated": manifest.created,
        "distribution": files,
        "recordSet": [_record_set(name) for name in names if name.startswith(DOCUMENTS)],
    }
    write_json(out, description)


def _file_objects(run: Path, folder: str) -> Iterator[Json]:
    """The marker, then every sealed file, with encoding, size and digest in the words of schema.org."""
    marker = {"bytes": (run / MARKER).stat().st_size, "sha256": sha256_file(run / MARKER)}
    for name, entry in ({MARKER: marker} | sealed_files(run)).items():
        yield {
            "@type": "cr:FileObject",
            "@id": name,
            "name": name,
            "contentUrl": f"{folder}/{name}",
            "encodingFormat": ENCODINGS.get(Path(name).suffix, "application/octet-stream"),
            "contentSize": str(entry["bytes"]),
            "sha256": entry["sha256"],
        }


def _record_set(file: str) -> Json:
    """The documents of one split as records."""
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
    """A sentence for each stage that changed the number of documents, and for each split."""
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
