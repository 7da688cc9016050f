"""The 2021 paper's Table 1: each preset has the published size and lies on the published number of
GPUs."""

from pathlib import Path

import pytest

from mlm_repro import experiments
from mlm_repro.engine.costs import parameter_count
from mlm_repro.engine.parallel.layout import layout_of, split_layers
from mlm_repro.engine.pipeline.schedule import compute_orders
from mlm_repro.engine.run.resolved import read_run_config

FOLDER = Path(experiments.__file__).parent / "models" / "ptd-p"
TABLE_1 = [
    ("1.7", 32),
    ("3.6", 64),
    ("7.5", 128),
    ("18.4", 256),
    ("39.1", 512),
    ("76.1", 1024),
    ("145.6", 1536),
    ("310.1", 1920),
    ("529.6", 2520),
    ("1008", 3072),
]
"""Billions of parameters, GPUs."""


@pytest.mark.parametrize(("billions", "gpus"), TABLE_1)
def test_a_row_of_table_1(billions: str, gpus: int) -> None:
    config = read_run_config(FOLDER / f"{billions}b.toml")
    assert parameter_count(config.model) / 1e9 == pytest.approx(float(billions), abs=0.05)
    layout = layout_of(config, gpus)
    assert layout.world_size == gpus
    microbatches = config.train.global_batch_size // (config.train.microbatch_size * layout.dp)
    parallel = config.parallel
    assert (
        len(split_layers(config.model.num_layers, parallel.pp, parallel.chunks))
        == parallel.pp * parallel.chunks
    )
    assert (
        len(compute_orders(parallel.schedule, parallel.pp, parallel.chunks, microbatches))
        == parallel.pp
    )
