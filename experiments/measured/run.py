"""Runs what an experiment measures on this machine. Torch is imported only where it measures."""

from importlib import import_module
from pathlib import Path

from experiments.catalogue import Experiment
from experiments.sealed import Line, seal_numbers
from lineage.records import Record
from lineage.run import RunDirectory

MEASUREMENTS = {
    "activations": "activations:measure_activations",
    "bubble": "bubble:measure_bubbles",
    "parameters": "built:measure_built",
    "products": "products:measure_products",
    "released": "released:measure_released",
    "schedules": "bubble:measure_schedules",
    "tensor-parallel": "huggingface:measure_huggingface",
    "traffic": "traffic:measure_traffic",
    "words": "words:measure_words",
    "zero-communication": "zero:measure_sent_bytes",
    "zero-memory": "zero:measure_held_bytes",
}
"""Module and function of each name that experiment.toml may have as `measures`."""
OF_EXPERIMENT = ("bubble", "parameters", "released")
"""Those that are told whose numbers are measured."""


def run_measured(experiment: Experiment, runs: Path, limit: int | None = None) -> tuple[RunDirectory, list[Record]]:
    """A sealed run of what was measured, and its records; the same numbers are found again."""
    return seal_numbers(experiment, "-measured", _measure(experiment, limit), runs)


def _measure(experiment: Experiment, limit: int | None) -> list[Line]:
    module, function = MEASUREMENTS[experiment.measures].split(":")
    measure = getattr(import_module(f"experiments.measured.{module}"), function)
    given = (experiment,) if experiment.measures in OF_EXPERIMENT else ()
    lines: list[Line] = measure(*given, **({"limit": limit} if experiment.measures == "released" else {}))
    return lines
