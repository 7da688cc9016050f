"""Parameters of the published models, counted in the models that the engine builds for them."""

import math

from engine.config import ModelConfig
from engine.formats import parameters_of
from experiments.catalogue import Experiment
from experiments.published import position, workload_rows
from experiments.quantities import bert_of
from experiments.sealed import Line, lines
from experiments.simulator.measurements import workload_of
from experiments.simulator.workload import checked_config
from lineage.progress import Progress, announce


def built_parameters(config: ModelConfig, part: str = "") -> int:
    """Numbers in the whole model, or in the modules whose names begin with `part`; built without their values."""
    return sum(math.prod(each.global_shape) for each in parameters_of(config) if each.name.startswith(part))


def measure_built(experiment: Experiment) -> list[Line]:
    """Billions of parameters of every model that the experiment counts, and those of its layers alone."""
    found: list[Line] = []
    for part in experiment.parts:
        rows, is_bert = workload_rows(part.workloads), "bert_parameters" in part.computed
        announce(f"{len(rows)} models, built without their values")
        with Progress(experiment.name, len(rows), "models") as progress:
            for row in rows:
                config = bert_of(row) if is_bert else checked_config(workload_of(row)).model
                values = {
                    "bert_parameters" if is_bert else "parameters": built_parameters(config) / 1e9,
                    "layer_parameters": built_parameters(config, "layers.") / 1e9,
                }
                found += lines(values=values, note="counted in the built model", **position(part, row))
                progress.advance()
    return found
