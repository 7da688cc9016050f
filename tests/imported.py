"""Every command with what it imports late, and a training step taken: what forked processes find
ready.

Where torch is not installed, only what needs none.
"""

import gc
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec

from mlm_repro.lineage.environment import list_gpus
from tests.commands import silence_end

COMMANDS: dict[str, Callable[[], object]] = {
    script.name: script.load()
    for script in entry_points(group="console_scripts")
    if script.name.startswith("mlm-")
}
LATE = (
    "mlm_repro.data_pipeline.pipeline",
    "mlm_repro.experiments.reproduce.reproduction",
    "mlm_repro.experiments.simulator.simulate",
    "mlm_repro.reports.page",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
)
LATE_WITH_TORCH = (
    "mlm_repro.engine.train",
    "mlm_repro.evaluation.evaluate",
    "mlm_repro.verify.runner",
)


for module in LATE:
    import_module(module)
if find_spec("torch"):
    for module in LATE_WITH_TORCH:
        import_module(module)
    import_module("tests.ranks").take_a_step()
list_gpus.cache_clear()  # a test may give a process another machine
gc.collect()
gc.freeze()  # a forked command has garbage of its own alone to look for
# Triton's bindings list at the end what they still hold, here and in no test's own process.
silence_end()
