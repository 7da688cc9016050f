"""The stages by name. `mlm-data run` runs those that a recipe lists, each verb runs one. Imports nothing slow.

Each file of this folder but `stage.py` declares one stage, which has the file's name. A filter does its own work. A
stage that examines the whole corpus has only its name and settings here; its work stands in `passes/`.
"""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from mlm_repro.data_pipeline.stages.stage import Stage, TextFilter, TokenFilter

PAPER = ("clean", "language", "length", "deduplicate", "decontaminate", "split", "tokenize")
"""The stages of the Megatron-LM paper (section 4.1): those of a recipe that lists none."""


def _declared() -> Iterator[type[Stage]]:
    for file in iter_modules(__path__):
        module = import_module(f"mlm_repro.data_pipeline.stages.{file.name}")
        classes = (each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Stage))
        yield from (each for each in classes if each.__module__ == module.__name__ and hasattr(each, "name"))


STAGES = tuple(_declared())
TEXT_FILTERS = {stage.name: stage for stage in STAGES if issubclass(stage, TextFilter)}
TOKEN_FILTERS = {stage.name: stage for stage in STAGES if issubclass(stage, TokenFilter)}
