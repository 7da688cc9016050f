"""Tables of the keys of files that pydantic models describe."""

import ast
import inspect
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from typing import Any, get_args

from pydantic import BaseModel

from docs.hooks.commands import cell, table
from mlm_repro.lineage.atomic import JSON


def keys(dotted: str) -> str:
    """Return as one Markdown text a table of the keys of a pydantic model, whose dotted path,
    module and class, is `dotted`, and for each model inside it its docstring and such a table: key,
    value, default and meaning. Imports the model's module."""
    module, _, name = dotted.rpartition(".")
    model: type[BaseModel] = getattr(import_module(module), name)
    schema = model.model_json_schema()
    meant = {re.sub(r"\W", "_", nested.__name__): meanings(nested) for nested in models_in(model)}
    parts = [_table(schema, meant[name])]
    for inner, definition in schema.get("$defs", {}).items():
        if "properties" in definition:
            parts.append(f"**{inner}.** {cell(definition.get('description', ''))}")
        if definition.get("properties"):
            parts.append(_table(definition, meant[inner]))
    return "\n\n".join(parts)


def models_in(kind: Any) -> Iterator[type[BaseModel]]:
    """Yield the classes of pydantic models in a type annotation: the annotation itself or its
    arguments, and after each model the models in its fields. A model used twice comes twice."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
        for field in kind.model_fields.values():
            yield from models_in(field.annotation)
    for argument in get_args(kind):
        yield from models_in(argument)


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return a dict by field's name of the string that follows the field in the source of the class
    `model`, inherited fields included. Fields without such a string are left out, and so are all
    fields of a class without source."""
    texts = dict[str, str]()
    for base in reversed(model.__mro__[: model.__mro__.index(BaseModel)]):
        with suppress(OSError):  # a model that was built without source code has no strings
            (tree,) = ast.parse(inspect.getsource(base)).body
            texts |= {
                field.target.id: text.value.value
                for field, text in pairwise(getattr(tree, "body", ()))
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
            }
    return texts


def _table(schema: JSON, meant: dict[str, str]) -> str:
    rows = []
    for key, field in schema["properties"].items():
        default = "needed" if key in schema.get("required", ()) else _default(field.get("default"))
        rows.append(
            (f"`{key}`", _kind(field), default, cell(meant.get(key) or field.get("description")))
        )
    return table(("key", "value", "default", "meaning"), rows)


def _kind(schema: JSON) -> str:
    """Return the values that a field's JSON schema, `schema`, allows, in words, such as "list of
    whole number" or the name of a model."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        kinds = [_kind(option) for option in schema["anyOf"]]
        return " or ".join(dict.fromkeys("none" if kind == "null" else kind for kind in kinds))
    if "enum" in schema:
        return ", ".join(f"`{value}`" if value else "empty" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        members = schema.get("prefixItems") or [schema.get("items") or {}]
        return f"list of {', '.join(map(_kind, members))}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"table of {_kind(schema['additionalProperties'])}"
    kind = schema.get("type", "anything")
    names = {
        "object": "table",
        "integer": "whole number",
        "boolean": "true or false",
        "string": "text",
    }
    return names.get(kind, kind)


def _default(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return ""
    return "its own defaults" if isinstance(value, dict) else f"`{json.dumps(value)}`"
