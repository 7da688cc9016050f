"""Files that other rooms wrote, read as typed values or refused in one sentence."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from lineage.errors import IntegrityFailure
from lineage.files import Document


@dataclass(frozen=True)
class Problem:
    """Something the page cannot show, in one sentence."""

    part: str
    """File it concerns."""
    sentence: str
    damaged: bool
    """False where the file is only absent or empty; True where it is not what it was when it was written."""


DocumentT = TypeVar("DocumentT", bound=Document)


def read_json(path: Path, model: type[DocumentT]) -> DocumentT:
    """The file as a document. Raises IntegrityFailure where it is not one."""
    return parse_document(read_values(path), model, path.name)


def read_values(path: Path) -> Any:
    """The file's JSON. Raises IntegrityFailure where it has none."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise IntegrityFailure(f"{path.name} cannot be read: {one_line(error)}") from error


def parse_document(values: Any, model: type[DocumentT], name: str) -> DocumentT:
    """Plain values as a document; `name` says where they stand. Raises IntegrityFailure where they are none."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise IntegrityFailure(f"{name} is not what it should be: {where}: {first['msg']}") from error


def one_line(error: Exception) -> str:
    """What the error says, short and without line breaks."""
    return " ".join(str(error).split())[:200]


def file_name(text: str) -> str:
    """The text with a hyphen for whatever does not belong in a file's name."""
    return re.sub(r"[^\w.-]", "-", text)
