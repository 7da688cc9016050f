"""Configuration is data: TOML files read into frozen pydantic models, strictly.

One keyword, `extends = "other.toml"`, supplies defaults: a file beside it, or a shipped one by its
path in a clone. The nearest file wins. One override syntax, `section.key=value`, has its value
parsed as TOML and checked against the model.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from mlm_repro.lineage.atomic import JSON, read_bytes
from mlm_repro.lineage.errors import BadInput, cause, did_you_mean
from mlm_repro.lineage.shipped import shipped_at


class Config(BaseModel):
    """A frozen section of configuration in which an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


LONGEST_CHAIN = 20
"""Largest number of files in a chain of `extends`."""
MOST_BYTES = 1 << 20
DEEP = re.compile(r"""(?<![\w"'-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){64}""")
"""Matches a key inside of more than 63 tables, which is refused: tomllib's time rises with the
square of the depth."""
ConfigT = TypeVar("ConfigT", bound=BaseModel)


def load_config(path: Path, model: type[ConfigT], overrides: Sequence[str] = ()) -> ConfigT:
    """Return the configuration in the TOML file `path`, read over the file that it extends, with
    the `overrides` applied, as a validated instance of the class `model`. An override is a text
    `section.key=value`; the value is read as TOML, or taken as text if it is not TOML. Later
    overrides win.

    Raises BadInput as `read_toml` does, for an override of another form, and for a value that
    validation refuses, naming its dotted key. The error for an unknown key also names a known key
    that may be meant, if there is one.
    """
    where = " --set ".join([str(path), *overrides])
    return parse_config(
        reduce(_merge, map(_parse_override, overrides), read_toml(path)), model, where
    )


def override_config(config: ConfigT, overrides: Sequence[str]) -> ConfigT:
    """Return a copy of `config` with `section.key=value` overrides, validated again. Raises
    BadInput for an override of another form or a value that validation refuses, as `load_config`
    does."""
    values = reduce(_merge, map(_parse_override, overrides), config.model_dump(mode="json"))
    return parse_config(values, type(config), "--set")


def to_toml(config: BaseModel) -> str:
    """Return the text of a TOML file with the values of `config` that differ from the defaults.
    Reading the text gives an equal configuration, except in what the text cannot hold: a value
    None, which is left out and gives the default, and a list of sections, with which the text is
    not TOML."""
    return "\n".join(_sections(config.model_dump(mode="json", exclude_defaults=True), "")) + "\n"


def _sections(values: JSON, name: str) -> list[str]:
    """Return a list of the lines of TOML for the values of a section, a dict, then for the sections
    inside it; a value None has no line. `name` is the beginning of their headings, such as
    `train.`; empty for the whole file."""
    lines = []
    sections = []
    for key, value in values.items():
        if isinstance(value, dict):
            sections += ["", f"[{name}{key}]", *_sections(value, f"{name}{key}.")]
        elif value is not None:
            lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    return [*lines, *sections]


def flatten(values: JSON, prefix: str = "") -> JSON:
    """Return the values of nested sections, dicts, as one flat dict dotted key → value, with keys
    such as `train.seed`; an empty section has no key. The text `prefix`, such as `run.`, stands
    before every key, with no dot added; it is empty by default."""
    flat: JSON = {}
    for key, value in values.items():
        flat |= (
            flatten(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return flat


def parse_config(values: JSON, model: type[ConfigT], where: str) -> ConfigT:
    """Return the configuration with these plain values, a dict, as a validated instance of the
    class `model`. Raises BadInput for values that `model` refuses or that are nested too deeply,
    and for an integer of more than 63 bits, with a sentence that gives `where` as their origin."""
    try:
        if _is_too_large(values):
            raise BadInput(f"{where} has an integer of more than 63 bits: give a smaller number")
        return model.model_validate(values)
    except RecursionError as error:
        raise BadInput(f"{where} has values that are nested too deeply") from error
    except ValidationError as error:
        raise BadInput(f"{where}: {_sentence(error, model)}") from error


def _is_too_large(value: object) -> bool:
    if isinstance(value, dict | list):
        return any(map(_is_too_large, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and not -1 << 63 <= value < 1 << 63


def read_toml(path: Path, seen: tuple[Path, ...] = ()) -> JSON:
    """Return the values of the TOML file `path` as nested dicts, without its key `extends`. If the
    file has that key, its values are merged over the values of the file that the key names, which
    is read in the same way. Tables of one name are merged key by key, at every depth; any other
    value replaces the extended file's. The name in `extends` is a path from the folder of `path`,
    or else the path in a clone of a file that this package ships. `seen` has the resolved paths of
    the files that extend this one; the function itself passes it, and other callers leave it out.

    Raises BadInput for a file that is missing, unreadable, too large, not TOML or nested too
    deeply, for an `extends` that is not a text or has a NUL, and for a chain of `extends` that has
    more than LONGEST_CHAIN (20) files or is a circle.
    """
    if len(seen) == LONGEST_CHAIN:
        raise BadInput(
            f"{seen[0]}: `extends` goes on for more than {LONGEST_CHAIN} files: join some of them"
        )
    if path.resolve() in seen:
        raise BadInput(
            f"{path}: its `extends`, or that of a file that it extends, leads back to it: take one"
            " of them out"
        )
    try:
        text = read_bytes(path, MOST_BYTES).decode("utf-8")
        if DEEP.search(text):
            raise BadInput(
                f"{path} has a key inside of more than 63 tables: nest its tables less deeply"
            )
        values = tomllib.loads(text)
    except FileNotFoundError as error:
        raise BadInput(f"configuration file {path} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"configuration file {path} cannot be read: {cause(error)}; name a file of text in"
            " UTF-8 that this user may read"
        ) from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not valid TOML: {error}") from error
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str) or "\0" in base:
        raise BadInput(f"{path}: `extends` is {base!r}, not the name of a file")
    beside = path.parent / base
    base_file = beside if os.path.exists(beside) else shipped_at(base) or beside
    return _merge(read_toml(base_file, (*seen, path.resolve())), values)


def _merge(base: JSON, over: JSON) -> JSON:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = (
            _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return merged


def _parse_override(text: str) -> JSON:
    """Return an override, a text such as `section.key=value`, as nested dicts, `{"section": {"key":
    value}}`; a key may lie in no section (`name=value`) or in up to 63. A value that is not TOML is
    taken as text. Raises BadInput for a text without `=`, an empty part of the key, or a key in
    more than 63 sections."""
    dotted, equals, raw = text.partition("=")
    if not equals or not all(dotted.split(".")) or DEEP.match(dotted):
        raise BadInput(
            f"override {text!r} is not of the form section.key=value, or its key is inside of more"
            " than 63 sections"
        )
    try:
        value: Any = tomllib.loads(f"value = {raw}")["value"]
    except (ValueError, RecursionError):
        value = raw
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return dict(value)


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all keys of a pydantic model, at any depth: a section's own name,
    then the names in it. `prefix` stands before every name."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _keys(kind, f"{prefix}{name}.")


def _sentence(error: ValidationError, model: type[BaseModel]) -> str:
    """Return one sentence on values that the class `model` refused with `error`: on the first
    unknown key, with a known one that may be meant, such as the nearest, if there is one; or else
    on the first fault. Other unknown keys are named, other faults counted."""
    errors = error.errors()
    first = next((fault for fault in errors if fault["type"] == "extra_forbidden"), errors[0])
    location = tuple(first["loc"])
    dotted = ".".join(str(step) for step in location)
    unknown = [
        ".".join(map(str, fault["loc"])) for fault in errors if fault["type"] == "extra_forbidden"
    ][1:]
    more = f"; also unknown: {', '.join(unknown)}" if unknown else ""
    if others := len(errors) - 1 - len(unknown):
        more += f" (and {others} more)"
    if first["type"] == "extra_forbidden":
        name = str(location[-1])
        keys = list(_keys(model))
        inside = f"{dotted.rpartition('.')[0]}."
        # Of another section: `train.iteration` is not meant for `train.continues.iteration`.
        homes = [key for key in keys if key.endswith(f".{name}") and not key.startswith(inside)]
        home = homes[0] if homes else ""
        known = getattr(model, "other_names", {}).get(location[-1]) or home
        names = sorted({key.rpartition(".")[2] for key in keys} - {name})
        hint = f"this program's key is {known}" if known else did_you_mean(name, names, "")
        return "; ".join(filter(None, (f"unknown key {dotted!r}", hint))) + more
    if first["type"] == "missing":
        return f"missing key {dotted!r}{more}"
    text = (
        first["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list, such as ['a']")
    )
    message = text.replace("Input should", f"{first['input']!r:.60} should", 1)
    return f"{dotted}: {message}{more}" if dotted else f"{message}{more}"
