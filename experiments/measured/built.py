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


def built_parameters(config: ModelConfig, part: str = "") -> int:
    """Numbers in the whole model, or in the modules whose names begin with `part`; built without their values."""
    return sum(math.prod(each.global_shape) for each in parameters_of(config) if each.name.startswith(part))


def measure_built(experiment: Experiment) -> list[Line]:
    """Billions of parameters of every model that the experiment counts, and those of its layers alone."""
    lines: list[Line] = []
    for part in experiment.parts:
        rows = workload_rows(part.workloads)
        announce(f"{len(rows)} models, built without their values")
        with Progress(experiment.name, len(rows), "models") as progress:
            for row in rows:
                is_bert = "bert_parameters" in part.computed
                config = bert_of(row) if is_bert else checked_config(workload_of(row)).model
                for quantity, start in (
                    ("bert_parameters" if is_bert else "parameters", ""),
                    ("layer_parameters", "layers."),
                ):
                    lines.append({
                        "series": row["series"], "x": x_of(part, row), "x_name": part.x, "quantity": quantity,
                        "kind": "measured", "value": built_parameters(config, start) / 1e9,
                        "note": "counted in the built model",
                    })  # fmt: skip
                progress.advance()
    return lines
