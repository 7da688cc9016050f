"""Runs what an experiment measures on this machine. Torch is imported only where it measures."""

from collections.abc import Sequence
from pathlib import Path

from experiments.catalogue import Experiment
from experiments.sealed import Line, seal_numbers
from lineage.records import Record
from lineage.run import RunDirectory


def run_measured(experiment: Experiment, runs: Path) -> tuple[RunDirectory, list[Record]]:
    """A sealed run of what was measured, and its records; the same numbers are found again."""
    name = f"experiment-{experiment.name.replace('/', '-')}-measured"
    return seal_numbers(experiment, name, _measure(experiment), {}, runs)


def format_measured(records: Sequence[Record]) -> str:
    """A line for each number."""
    return "\n".join(
        f"{record.series:<44}{record.quantity:<26}{'' if record.x is None else f'{record.x:g}':>6}"
        f"{record.value:>12.4g}  {record.kind}"
        for record in records
    )


def _measure(experiment: Experiment) -> list[Line]:
    match experiment.measures:
        case "bubble":
            from experiments.measured.bubble import measure_bubbles

            return measure_bubbles(experiment)
        case "parameters":
            from experiments.measured.built import measure_built

            return measure_built(experiment)
        case "products":
            from experiments.measured.products import measure_products

            return measure_products()
        case "zero-memory":
            from experiments.measured.zero import measure_held_bytes

            return measure_held_bytes()
        case "zero-communication":
            from experiments.measured.zero import measure_sent_bytes

            return measure_sent_bytes()
        case "tensor-parallel":
            from experiments.measured.huggingface import measure_huggingface

            return measure_huggingface()
    raise ValueError(f"nothing measures {experiment.measures!r}")
