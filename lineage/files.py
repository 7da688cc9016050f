"""The base class of file schemas, their readers and writers, and the schema of a run's manifest.

Writer and reader of a file use one class, which stands in the folder of the writer.
"""

import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlm_repro.lineage.atomic import JSON, parse_json, read_bytes, read_json, write_json, write_text
from mlm_repro.lineage.digest import read_digest
from mlm_repro.lineage.errors import IntegrityFailure

SAME = 1e-9
"""Relative tolerance of a float that is recomputed from rounded numbers or on another processor."""
GIVES = "its inputs give"
RETIRED_KEYS = {
    "english",
    "expected_candidate_precision",
    "gradient_square",
    "gradient_variance",
    "matrix_gflops",
    "noise_scale",
    "trust_ratios",
    "update_norms",
    "weight_norms",
}
"""Keys that earlier versions wrote into documents, and that readers skip."""


class FileSchema(BaseModel):
    """Base class of the schema of a file, or of a part of a file, as a frozen model: fields are
    checked, numbers are finite, and unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, defer_build=True)

    def to_json(self) -> JSON:
        """Return a dict of this document's fields by name, as plain JSON values, without those that
        were not given and so have their defaults. A field that was given is there, also if its
        value is None or equals the default."""
        return self.model_dump(mode="json", exclude_unset=True)

    def to_line(self) -> str:
        """Return this document, as the method `to_json` has it, as a string, the line of a `.jsonl`
        file, newline included. Raises ValueError for a number that is not finite."""
        return json.dumps(self.to_json(), ensure_ascii=False, allow_nan=False) + "\n"


SchemaT = TypeVar("SchemaT", bound=FileSchema)


def write_document(path: Path, document: FileSchema) -> None:
    """Write `document`, without the fields that were not given, as indented JSON to the file
    `path`, in place of one that is there. Missing folders are made."""
    write_json(path, document.to_json())


def read_document(path: Path, model: type[SchemaT]) -> SchemaT:
    """Return the document in the JSON file `path` as an instance of the class `model`. Raises
    IntegrityFailure if the file cannot be read or does not fit that schema."""
    return parse_document(read_values(path), model, path.name)


def write_lines(path: Path, lines: Iterable[FileSchema]) -> None:
    """Replace the file `path` by a line of JSON for each FileSchema of `lines`, in order, with the
    fields that `to_json` returns. Raises ValueError for a number that is not finite."""
    write_text(path, "".join(line.to_line() for line in lines))


def read_lines(path: Path, model: type[SchemaT]) -> list[SchemaT]:
    """Return a list of the lines of the `.jsonl` file `path`, in order, each as an instance of the
    class `model`.

    Raises IntegrityFailure if the file cannot be read, if a line is not JSON, or if one does not
    fit the schema; only the message about the schema has the line's number.
    """
    try:
        values = [parse_json(line) for line in read_bytes(path).splitlines()]
    except (ValueError, OSError) as error:
        raise IntegrityFailure(
            f"{path.name} cannot be read: {one_line(error)}; put back an undamaged copy of it"
        ) from error
    return [
        parse_document(value, model, f"line {number} of {path.name}")
        for number, value in enumerate(values, 1)
    ]


def read_values(path: Path) -> Any:
    """Return the value of the JSON file `path` in Python's types. Raises IntegrityFailure, with the
    file's name, if the file cannot be read or is not JSON."""
    try:
        return read_json(path)
    except (ValueError, OSError) as error:
        raise IntegrityFailure(
            f"{path.name} cannot be read: {one_line(error)}; put back an undamaged copy of it"
        ) from error


def read_object(path: Path) -> JSON:
    """Return the object of the JSON file `path` as a dict. Raises IntegrityFailure with the whole
    path if the file cannot be read or holds anything else."""
    try:
        values = read_values(path)
    except IntegrityFailure as error:
        raise IntegrityFailure(f"{path.parent}/{error}") from error
    if not isinstance(values, dict):
        raise IntegrityFailure(
            f"{path} cannot be read: it is not a JSON object; put back an undamaged copy of it"
        )
    return values


def parse_document(values: Any, model: type[SchemaT], name: str) -> SchemaT:
    """Return the document with these plain values, a dict, as an instance of the class `model`.
    Raises IntegrityFailure if they do not fit that schema, with a sentence that gives `name` as
    their origin."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"]) or "the whole file"
        raise IntegrityFailure(
            f"{name} does not fit its schema: {where}: {first['msg']}; put back an undamaged copy"
            " of it"
        ) from error


def one_line(error: object) -> str:
    """Return the text of an error or another value on one line: each run of white space becomes a
    space, and it is cut after 200 characters."""
    return " ".join(str(error).split())[:200]


def unlike(where: str, said: object, gives: object, by: str = GIVES) -> Iterator[str]:
    """Yield one sentence for each field, at any depth, whose stated value in `said` and recomputed
    value in `gives` differ. Both are plain values, or pydantic models.

    A field that one of the two lacks counts as None there; lists of unequal length count as one
    field. A recomputed float may differ by one part in 10⁹, `SAME`. A sentence names the field by
    `where`, and `by` introduces the recomputed value.
    """
    said, gives = (
        value.model_dump() if isinstance(value, BaseModel) else value for value in (said, gives)
    )
    if isinstance(said, dict) and isinstance(gives, dict):
        for key in {**said, **gives}:
            yield from unlike(f"{where}: {key}", said.get(key), gives.get(key), by)
    elif (
        isinstance(said, list | tuple)
        and isinstance(gives, list | tuple)
        and len(said) == len(gives)
    ):
        for number, (stated_item, remade) in enumerate(zip(said, gives, strict=True), 1):
            yield from unlike(f"{where}, {number}", stated_item, remade, by)
    elif (
        isinstance(said, float | int)
        and isinstance(gives, float)
        and math.isclose(said, gives, rel_tol=SAME)
    ):
        return
    elif said != gives:
        yield f"{where} is {one_line(said)}; {by} {one_line(gives)}"


class Remade(NamedTuple):
    """Comparison that a check of a run yields: a stated value `said`, and `gives`, the same value
    recomputed. `where` and `by` are for the sentences of the function `unlike`, which compares the
    two: `where` names the value, `by` introduces the recomputed one."""

    where: str
    said: object
    gives: object
    by: str = GIVES


class Absent(NamedTuple):
    """Mark that a check of a run yields in place of a comparison that it left out. `name` says in
    words what is missing or was not compared; `ever` is True, the default, if something is missing
    on this machine, and False if no machine recomputes the value."""

    name: str
    ever: bool = True
    """True if something that the comparison needs is missing on this machine, False if the
    comparison is never made."""


class Parent(NamedTuple):
    """Item that a check of a run yields to name a further directory, `place`, that is to be checked
    in the same way, with all that it was made from in turn: an input of the run, or a directory
    inside the run or inside a folder of runs. With a `name`, under which the run's manifest states
    an input's digest, this digest is compared with the one that `digest_of` returns for `place`.
    Things that the check of `place` lacks on this machine count as lacking in the run too or, if
    `strictly` is False, are only reported as not recomputed."""

    place: Path
    name: str = ""
    """Name of the input in the manifest; empty if the manifest states no digest of it."""
    digest_of: Callable[[Path], str] = read_digest
    """Function that returns the digest of `place` to compare with the one in the manifest."""
    strictly: bool = True
    """True if comparisons that the check of this directory lacks count as lacking in the run too,
    False if they are only reported as not recomputed."""


Comparisons = Iterator[str | Remade | Absent | Parent]


def as_said(result: BaseModel, values: Mapping[str, object], where: str, by: str = GIVES) -> Remade:
    """Return a Remade that sets fields of the document `result` beside `values`, a dict of
    recomputed values by field's name: its `said` is a dict of the same fields of `result`, its
    `gives` a copy of `values`. Nothing is compared here. `where` names the document in the later
    sentences on differences, and `by` introduces the recomputed values. `result` must have each
    field."""
    return Remade(where, {name: getattr(result, name) for name in values}, {**values}, by)


def misread(values: Any, schema: Any, where: str) -> Iterator[str]:
    """Yield a sentence for each key of a document, at any depth, that the class `schema` does not
    have or reads as another value; keys in `RETIRED_KEYS` are passed over. `values` is the document
    as a dict of plain values; `where` names it in the sentences. Raises IntegrityFailure if the
    schema refuses the document, as when it lacks a key that is required."""
    values = parse_json(
        json.dumps(values),
        lambda pairs: {key: entry for key, entry in pairs if key not in RETIRED_KEYS},
    )
    read = parse_document(values, schema, where)
    known = {
        key: entry for key, entry in read.to_json().items() if key not in (read.model_extra or {})
    }
    yield from unlike(where, values, known, "a file of its kind has")


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Environment(FileSchema):
    """Record of the software, command and machine of a run: in `mlm_repro` the release of this
    package, in `source` its commit; `python`, other `packages` and environment `variables`; in
    `argv` the command line; and the machine's processor, cores, memory and GPUs. A fact that was
    not recorded is empty, a number None."""

    mlm_repro: str = ""
    source: JSON = Field(default_factory=dict)
    """Commit of the code; `dirty` is True if files differed from the commit."""
    python: str = ""
    platform: str = ""
    cpu: str = ""
    cores: int | None = None
    memory_bytes: int | None = None
    gpus: list[str] = Field(default_factory=list)
    packages: dict[str, str] = Field(default_factory=dict)
    variables: dict[str, str] = Field(default_factory=dict)
    numerics: dict[str, str] = Field(default_factory=dict)
    """Software and hardware, by name, that the bits of a result depend on."""
    argv: list[str] = Field(default_factory=list)

    @property
    def machine(self) -> str:
        """Processor, number of cores and GPUs, as one text with commas; `hardware not recorded` if
        all are unknown."""
        facts = (self.cpu, f"{self.cores} cores" if self.cores else "", *self.gpus)
        return ", ".join(fact for fact in facts if fact) or "hardware not recorded"

    @property
    def code(self) -> str:
        """Release of this package that this environment recorded, as text, such as `mlm-repro
        1.2.0`, with ` at ` and the first twelve characters of its commit if that was recorded."""
        commit = str(self.source.get("commit") or "")[:12]
        return f"mlm-repro {self.mlm_repro}" + (f" at {commit}" if commit else "")

    @property
    def sentence(self) -> str:
        """Sentence `Measured on MACHINE; code COMMIT.` about a measurement, without its second half
        if no commit was recorded."""
        commit = self.code.partition(" at ")[2]
        return f"Measured on {self.machine}{f'; code {commit}' if commit else ''}."


class Attempt(FileSchema):
    """One start of a training on its ranks: the number of iterations finished before it, the
    settings of its parallelism and its number of ranks, when it began, its code, versions of
    packages, machine and command, and the digest of the attempt before it, which chains all
    attempts."""

    iteration: int
    """Number of iterations that were finished when the attempt began."""
    parallel: JSON = Field(default_factory=dict)
    ranks: int
    began: str = ""
    code: str = ""
    """Hexadecimal SHA-256 of the source files that the training ran, from the function
    `code_digest`."""
    release: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    machine: str = ""
    command: list[str] = Field(default_factory=list)
    before: str = ""
    """Digest of the attempt before this one; for the first attempt the run's identity."""

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        by = f"{self.release}, code {self.code[:8]}, {versions}, on {self.machine}"
        return (
            f"from iteration {self.iteration} on {self.ranks} ranks by {by}:"
            f" {shlex.join(self.command)}"
        )


class Manifest(FileSchema):
    """manifest.json: kind, configuration and inputs of a run, written before any other file.
    Attempts are added as they begin."""

    name: str
    kind: str
    identity: str = ""
    created: str
    schema_version: int | None = None
    """Version of the schema of the run's kind; None for a run of the first release."""
    settings: JSON = Field(default_factory=dict)
    """The values of the configuration that differed from their defaults, on which the identity
    depends."""
    config: JSON = Field(default_factory=dict)
    outside_identity: list[str] = Field(default_factory=list)
    """Sections of the configuration that do not count in the identity."""
    config_digest: str = ""
    parents: dict[str, str] = Field(default_factory=dict)
    environment: Environment = Environment()
    attempts: list[Attempt] = Field(default_factory=list)
    """Starts of a training on its ranks, in order, each with the digest of the one before."""
    layouts: list[Attempt] = Field(default_factory=list)
    """Attempts as earlier versions recorded them: layouts alone, without a digest of the attempt
    before."""

    @property
    def layouts_in_turn(self) -> list[Attempt]:
        """List of the first attempt, and of each later one whose layout or number of ranks differs
        from the attempt before it; of a run of an earlier version, from its `layouts`. Empty if
        none is recorded."""
        by_layout = groupby(
            self.attempts or self.layouts, key=lambda attempt: (attempt.parallel, attempt.ranks)
        )
        return [next(alike) for _, alike in by_layout]
