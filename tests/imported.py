"""Every command with what it imports late, and a training step taken: what forked processes find ready."""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points

from tests.ranks import take_a_step

COMMANDS: dict[str, Callable[[], object]] = {
    script.name: script.load() for script in entry_points(group="console_scripts") if script.name.startswith("mlm-")
}
LATE = (
    "data_pipeline.pipeline", "engine.train", "engine.lr_finder", "evaluation.evaluate",
    "experiments.verify.parity_run",
    "experiments.reproduce.reproduction", "experiments.simulator.simulate", "reports.page", "matplotlib.figure",
    "matplotlib.backends.backend_agg", "matplotlib.backends.backend_pdf", "matplotlib.backends.backend_svg",
)  # fmt: skip


for module in LATE:
    import_module(module)
take_a_step()
