"""Parameters of the published models, counted in the models that the engine builds for them."""

import math

from engine.config import ModelConfig
from engine.formats import parameters_of
from experiments.catalogue import Experiment
from experiments.published import workload_rows, x_of
from experiments.quantities import bert_of
from experiments.sealed import Line
from experiments.simulator.measurements import workload_of
from experiments.simulator.workload import checked_config
from lineage.progress import Progress, announce


def built_parameters(config: ModelConfig) -> int:
    """Numbers in the whole model, built without memory for its values."""
    return sum(math.prod(parameter.global_shape) for parameter in parameters_of(config))


def measure_built(experiment: Experiment) -> list[Line]:
    """Billions of parameters of every model that the experiment counts."""
    lines: list[Line] = []
    for part in experiment.parts:
        rows = workload_rows(part.workloads)
        announce(f"{len(rows)} models, built without their values")
        with Progress(experiment.name, len(rows), "models") as progress:
            for row in rows:
                is_bert = "bert_parameters" in part.computed
                config = bert_of(row) if is_bert else checked_config(workload_of(row)).model
                lines.append({
                    "series": row["series"], "x": x_of(part, row), "x_name": part.x,
                    "quantity": "bert_parameters" if is_bert else "parameters",
                    "kind": "measured", "value": built_parameters(config) / 1e9, "note": "counted in the built model",
                })  # fmt: skip
                progress.advance()
    return lines
