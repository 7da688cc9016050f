"""Tables of keys for what pydantic models describe."""

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


def keys(dotted: str) -> str:
    """A table for a model, and one for each model inside it."""
    module, _, name = dotted.rpartition(".")
    model: type[BaseModel] = getattr(import_module(module), name)
    schema = model.model_json_schema()
    meant = {re.sub(r"\W", "_", each.__name__): meanings(each) for each in models_in(model)}
    parts = [_table(schema, meant[name])]
    for inner, one in schema.get("$defs", {}).items():
        if "properties" in one:
            parts.append(f"**{inner}.** {cell(one.get('description', ''))}")
        if one.get("properties"):
            parts.append(_table(one, meant[inner]))
    return "\n\n".join(parts)


def models_in(kind: Any) -> Iterator[type[BaseModel]]:
    """The models of a type: itself, or those that it is put together of, with those of their
    fields."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
        for field in kind.model_fields.values():
            yield from models_in(field.annotation)
    for part in get_args(kind):
        yield from models_in(part)


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """What the string after each field of a model, its own or one that it inherits, says of it."""
    found: dict[str, str] = {}
    for each in reversed(model.__mro__[: model.__mro__.index(BaseModel)]):
        with suppress(OSError):  # a model that no source defines has none of its own
            (tree,) = ast.parse(inspect.getsource(each)).body
            found |= {
                field.target.id: said.value.value
                for field, said in pairwise(getattr(tree, "body", ()))
                if isinstance(field, ast.AnnAssign) and isinstance(said, ast.Expr)
            }
    return found


def _table(schema: dict[str, Any], meant: dict[str, str]) -> str:
    rows = []
    for key, one in schema["properties"].items():
        default = "needed" if key in schema.get("required", ()) else _default(one.get("default"))
        rows.append(
            (f"`{key}`", _kind(one), default, cell(meant.get(key) or one.get("description")))
        )
    return table(("key", "value", "default", "meaning"), rows)


def _kind(schema: dict[str, Any]) -> str:
    """The values that a schema allows, in words."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        kinds = [_kind(one) for one in schema["anyOf"]]
        return " or ".join(dict.fromkeys("none" if kind == "null" else kind for kind in kinds))
    if "enum" in schema:
        return ", ".join(f"`{value}`" if value else "empty" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        items = schema.get("items") or {}
        places = schema.get("prefixItems")
        return f"list of {', '.join(map(_kind, places))}" if places else f"list of {_kind(items)}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"table of {_kind(schema['additionalProperties'])}"
    names = {
        "object": "table",
        "integer": "whole number",
        "boolean": "true or false",
        "string": "text",
    }
    return names.get(schema.get("type", ""), schema.get("type", "anything"))


def _default(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return ""
    return "its own defaults" if isinstance(value, dict) else f"`{json.dumps(value)}`"
