"""The section `sources` of a recipe, and the names of sources, without the code that reads them."""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator

from mlm_repro.data_pipeline.reading.readers import MAX_LINE_BYTES
from mlm_repro.lineage.config import Config

HUB_NAMES = ("wikipedia", "openwebtext", "realnews", "cc-stories")
ENDINGS = {
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "csv": (".csv", ".tsv"),
    "warc": (".warc", ".wet"),
    "text": (".txt", ".md", ".rst"),
    "documents": (".jsonl", ".parquet"),
}
"""Dict from each kind of files to the endings that the names of such files have without
compression."""
HUB = "hub:"
INSTALLED_DOCS = "installed-docs"


def check_source_name(name: str) -> None:
    """Raise ValueError if `name`, a source as a recipe writes it, is of no known kind, if a kind of
    files lacks its path, as in `jsonl:`, or if a name on the hub lacks its owner, as in `hub:NAME`.
    The error has the nearest known name, or all kinds if none is near. The source itself is not
    looked for."""
    kind, colon, path = name.partition(":")
    is_known = name in (*HUB_NAMES, INSTALLED_DOCS) or (name.startswith(HUB) and "/" in path)
    if is_known or (path and kind in ENDINGS):
        return
    if kind in ENDINGS:
        raise ValueError(f"source {name!r} needs a path: {kind}:PATH")
    if name.startswith(HUB):
        raise ValueError(f"source {name!r} must name a data set and its owner: hub:OWNER/NAME")
    known = [*HUB_NAMES, INSTALLED_DOCS, HUB, *(f"{kind}:" for kind in ENDINGS)]
    like = [
        known_kind
        for known_kind, endings in ENDINGS.items()
        if (not colon or "://" in name) and {*Path(name).suffixes} & {*endings}
    ]
    close = difflib.get_close_matches(f"{kind}{colon}", known, 1)
    hint = close[0] + path * close[0].endswith(":") if close else ""
    if like or "://" in name:
        hint = f"{[*like, 'jsonl'][0]}:{name}"
    advice = f"did you mean {hint!r}?" if hint else f"known: {', '.join(known)}"
    raise ValueError(f"unknown source {name!r}; {advice}")


class SourcesConfig(Config):
    """The section `sources` of a recipe: the texts to read, the limits on their size, and how much
    damage is accepted."""

    names: tuple[str, ...] = Field(min_length=1)
    """`wikipedia`, `openwebtext`, `realnews`, `cc-stories`, `installed-docs`, `hub:OWNER/NAME` with
    `/SUBSET` or `@REVISION` behind it, `jsonl:PATH`, `parquet:PATH`, `arrow:PATH` (of
    `save_to_disk`), `csv:PATH`, `warc:PATH`, `text:PATH` or `documents:PATH`, read in this order.
    PATH is a file, a directory, a pattern, `-` for standard input, or the address of one elsewhere,
    such as `s3://…`; `documents:PATH` is a dataset or what a verb wrote."""
    text_key: str = "text"
    """Key of the text in JSON lines, or column of a table; `body.text` is `text` in the object
    `body`."""
    id_key: str | None = None
    """Key of a document's own id, a string or a number. Without it, or where a line has none, the
    id is the path of the file below the source and the line."""
    split: tuple[str, ...] = ()
    """Splits to read from a data set that has several, such as `["train", "validation"]`; without
    it `train` alone. They are told by `dataset_dict.json`, or by the names of files as Hugging
    Face's datasets does."""
    metadata: tuple[str, ...] = ()
    """Other keys that stay with a document, under `metadata` in `documents/*.jsonl`."""
    offline_fallback: Literal["installed-docs"] | None = None
    """Source used instead when the Hugging Face hub is needed and cannot be reached; without it the
    run stops."""
    max_documents: PositiveInt | None = None
    """Largest number of documents taken from each source."""
    max_bytes: PositiveInt | None = None
    """Largest number of UTF-8 bytes taken from each source. Streams and files are cut off,
    installed documentation is sampled."""
    max_line_bytes: PositiveInt = MAX_LINE_BYTES
    """Longest line or text file that is accepted as a document."""
    max_bad_files: Annotated[int, Field(ge=0)] = 0
    """Largest number of files that may be damaged. Documents before the damage are read, and
    quarantine names the rest."""
    max_bad_fraction: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Largest share of the lines that may be malformed; above it the run stops and says why."""

    @property
    def piece_keys(self) -> dict[str, Any]:
        """Dict of those arguments of the class Piece that name keys of a line, `text_key`, `id_key`
        and `keep`, with this configuration's values."""
        return {"text_key": self.text_key, "id_key": self.id_key, "keep": self.metadata}

    @field_validator("split", mode="before")
    @classmethod
    def _one_split_is_a_list(cls, split: object) -> object:
        return [split] if isinstance(split, str) else split

    @field_validator("names")
    @classmethod
    def _names_are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            check_source_name(name)
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(
                f"source {twice!r} is named twice, and its documents would have the same ids: name"
                " it once in `sources.names`"
            )
        return names
