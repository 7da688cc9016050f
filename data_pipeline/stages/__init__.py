"""The stages by name. `mlm-data run` runs the stages that a recipe lists, each verb runs one.
Imports nothing slow.

Each file of this folder but `stage.py` declares one stage, which has the file's name. A filter does
its own work. A stage that examines the whole corpus has only its name and settings here; its work
stands in `passes/`.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from mlm_repro.data_pipeline.stages.stage import Stage, TextFilter, TokenFilter
from mlm_repro.lineage.digest import sha256_file, sha256_json

PAPER = ("clean", "language", "length", "deduplicate", "decontaminate", "split", "tokenize")
"""The stages of the Megatron-LM paper (section 4.1), which a recipe runs if it lists none."""


def _declared() -> Iterator[type[Stage]]:
    """Import the files of this folder, and yield the class of each stage that they declare, in
    order of the file names. A class without a `name`, such as a base class, is no stage."""
    for file in iter_modules(__path__):
        module = import_module(f"mlm_repro.data_pipeline.stages.{file.name}")
        classes = (
            stage
            for stage in vars(module).values()
            if isinstance(stage, type) and issubclass(stage, Stage)
        )
        yield from (
            stage
            for stage in classes
            if stage.__module__ == module.__name__ and hasattr(stage, "name")
        )


STAGES = tuple(_declared())


def is_own(name: str) -> bool:
    """Return True if `name` is the name `module:Class` of a stage of the user's own code, which
    alone has a colon."""
    return ":" in name


@cache
def own_stage(name: str) -> type[Stage]:
    """Return the class of the filter `module:Class`, imported from the working directory or from
    Python's path. The class gets this text as its attribute `name`; the working directory is
    appended to `sys.path`. It is imported once per process.

    Raises ValueError if it cannot be imported or is not a filter.
    """
    module, _, class_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    # Python takes cached bytecode for current if a file kept its length and its second of change:
    # an edit within a second would not count.
    writes = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        filter_class: type[Stage] = getattr(import_module(module), class_name)
        if not issubclass(filter_class, TextFilter | TokenFilter):
            raise TypeError("the class is neither a TextFilter nor a TokenFilter")
    except Exception as error:  # the user's code may raise anything
        raise ValueError(
            f"the own stage {name!r} cannot be used: {error}; it must be MODULE:CLASS, found on"
            " Python's path or in the working directory"
        ) from error
    finally:
        sys.dont_write_bytecode = writes
    filter_class.name = name
    return filter_class


def own_code(names: Iterable[str]) -> dict[str, str]:
    """Return a dict `NAME: code` → digest of the source of each stage of the user's own code among
    `names`: of its file, or of all Python files of its folder and below if it is in a package.
    Raises ValueError if such a stage cannot be imported or is not a filter."""
    facts = {}
    for name in filter(is_own, names):
        module = own_stage(name).__module__
        path = Path(str(sys.modules[module].__file__))
        files = sorted(path.parent.rglob("*.py")) if "." in module else [path]
        facts[f"{name}: code"] = sha256_json([sha256_file(file) for file in files])
    return facts


class Known(dict[str, type[Any]]):
    """The classes of the stages of a `kind`, such as TextFilter, by name. The user's own stages of
    that kind are found by `in`, and are not listed by an iteration; their first access imports
    them, and raises ValueError if they cannot be used. A look-up returns a user's own filter of any
    kind, and raises ValueError, not KeyError, for an unknown name."""

    def __init__(self, kind: type[Stage]) -> None:
        super().__init__({stage.name: stage for stage in STAGES if issubclass(stage, kind)})
        self._kind = kind

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (
            is_own(str(name)) and issubclass(own_stage(str(name)), self._kind)
        )

    def __missing__(self, name: str) -> type[Any]:
        return own_stage(name)


TEXT_FILTERS = Known(TextFilter)
TOKEN_FILTERS = Known(TokenFilter)
