"""The stages in order: `mlm-data run` runs them all, each verb runs one. Imports nothing slow.

Each file of this folder but `stage.py` declares one stage, and nothing else names it. A filter does its own work. A
stage that examines the whole corpus has only its name and settings here; its work stands in `passes/`.
"""

from collections.abc import Iterable, Iterator
from importlib import import_module
from pkgutil import iter_modules

from mlm_repro.data_pipeline.stages.stage import SOURCE, Stage, TextFilter, TokenFilter


def in_order(stages: Iterable[type[Stage]]) -> tuple[type[Stage], ...]:
    """Order stages: each behind the one that it names, an earlier step before a later one, then by name.

    Raises ValueError for a stage that names none of the others, or one of a later step.
    """
    waiting, order, names = list(stages), list[type[Stage]](), [SOURCE]
    while waiting:
        ready = [stage for stage in waiting if stage.after in names]
        if not ready:
            raise ValueError(f"no stage is called {' or '.join(sorted({stage.after for stage in waiting}))}")
        stage = min(ready, key=lambda stage: (stage.step, stage.name))
        if order and stage.step < order[-1].step:
            raise ValueError(f"{stage.name} cannot follow {stage.after}, which runs in a later step")
        waiting.remove(stage)
        order.append(stage)
        names.append(stage.name)
    return tuple(order)


def _declared() -> Iterator[type[Stage]]:
    for file in iter_modules(__path__):
        module = import_module(f"mlm_repro.data_pipeline.stages.{file.name}")
        classes = (each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Stage))
        yield from (each for each in classes if each.__module__ == module.__name__ and hasattr(each, "name"))


STAGES = in_order(_declared())
TEXT_FILTERS = {stage.name: stage for stage in STAGES if issubclass(stage, TextFilter)}
TOKEN_FILTERS = {stage.name: stage for stage in STAGES if issubclass(stage, TokenFilter)}
