"""What an audit found, as the predicate of an in-toto statement (https://in-toto.io/Statement/v1)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from lineage.errors import IntegrityFailure
from lineage.files import Document, parse_document, read_object

STATEMENT = "https://in-toto.io/Statement/v1"
AUDIT = "https://mlm-repro.example/audit/v1"


class Segment(Document):
    """Iterations that were computed again."""

    start: int
    """The checkpoint that they begin at; 0 is the beginning of the run."""
    end: int
    differs: list[str]


class Audit(Document):
    """What was done with a run, where, and what was found."""

    verb: Literal["replay", "run"]
    run: str = ""
    differs: list[str]
    """A sentence for each thing that is not as the run says; empty where everything is."""
    seed: str = ""
    """Draws the segments."""
    segments_in_all: int = 0
    segments: list[Segment] = Field(default_factory=list)
    layout: str = ""
    numerics: dict[str, str] = Field(default_factory=dict)
    not_compared: list[str] = Field(default_factory=list)
    """Inputs that were not there."""
    version: str = ""
    """Of this software, with its commit."""
    created: str = ""


@dataclass(frozen=True)
class Receipt:
    """A statement as it lies in a file."""

    subjects: dict[str, str]
    """SHA-256 of files of the run by their paths in it."""
    audit: Audit
    key: str
    """SHA-256 of the public key that its signature names; empty where it has none. It is not verified here."""


def read_receipt(path: Path) -> Receipt:
    """The receipt in a file. Raises IntegrityFailure where there is none."""
    values, signature = read_object(path), signature_of(path)
    if (values.get("_type"), values.get("predicateType")) != (STATEMENT, AUDIT):
        raise IntegrityFailure(f"{path} is not a receipt: it is no in-toto statement of {AUDIT}")
    audit = parse_document(values.get("predicate"), Audit, str(path))
    try:
        subjects = {str(subject["name"]): str(subject["digest"]["sha256"]) for subject in values["subject"]}
        key = str(read_object(signature)["verificationMaterial"]["publicKey"]["hint"]) if signature.is_file() else ""
    except (KeyError, TypeError) as error:
        raise IntegrityFailure(f"{path} is not a receipt: it or its signature lacks {error}") from error
    return Receipt(subjects, audit, key)


def signature_of(receipt: Path) -> Path:
    """Where the signature of a receipt is."""
    return receipt.with_name(f"{receipt.name}.sig")
