"""Parameters of the published models, counted in the models that the engine builds for them."""

import torch

from engine.config import ModelConfig
from engine.family import family_of
from engine.parallel.mesh import serial_mesh
from experiments.catalogue import Experiment
from experiments.published import workload_rows, x_of
from experiments.quantities import bert_of
from experiments.sealed import Line
from experiments.simulator.measurements import workload_of
from experiments.simulator.workload import checked_config
from lineage.progress import Progress, announce


def built_parameters(config: ModelConfig) -> int:
    """Numbers in the whole model, built without memory for its values."""
    with torch.device("meta"):
        model = family_of(config).model_class()(config, serial_mesh("meta"))
    return sum(parameter.numel() for parameter in model.parameters())


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
