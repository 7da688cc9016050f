"""What is made again of an honest training is what its files say, for every layout, precision and
family."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mlm_repro.engine.checkpoint.statistics import measure, to_json
from mlm_repro.engine.launch.threads import run_threads
from mlm_repro.engine.parallel.mesh import LoneAxis
from mlm_repro.engine.parallel.sharding import Role, ShardedParameter
from mlm_repro.engine.run.remade import _numbers, checkpoints, metrics
from mlm_repro.lineage.files import Absent, Remade, unlike
from tests.engine.small_run import small_config, train

KINDS: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "serial": (1, {}, {}, {}),
    "bf16": (1, {}, {"precision": "bf16"}, {}),
    "fp16": (1, {}, {"precision": "fp16", "initial_loss_scale": 2.0**24}, {}),
    "tp2": (2, {"tp": 2}, {}, {}),
    "pp2": (2, {"pp": 2}, {}, {}),
    "dp2": (2, {}, {}, {}),
    "dp2-zero": (2, {"shard_optimizer": True}, {}, {}),
    "lamb": (1, {}, {"optimizer": "lamb"}, {}),
    "bert": (1, {}, {}, {"family": "bert"}),
    "transformer-xl": (1, {}, {}, {"family": "transformer-xl"}),
}


@pytest.mark.parametrize("values", [[1.5, -2.0, 3.0], [1.0, float("nan")], [float("inf")] * 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_of_a_tensor_are_what_statistics_has(
    values: list[float], dtype: torch.dtype
) -> None:
    tensor = torch.tensor(values, dtype=dtype)
    bits = tensor.view(torch.int16 if dtype.itemsize == 2 else torch.int32).numpy()
    kind = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    parameter = ShardedParameter("x", nn.Parameter(tensor), LoneAxis(), Role.WEIGHT, None)
    assert _numbers(bits, kind) == to_json(measure(tensor, parameter))


@pytest.mark.parametrize("name", KINDS)
def test_an_honest_training_holds(name: str, dataset: Path, tmp_path: Path) -> None:
    ranks, parallel, more, model = KINDS[name]
    config = small_config(
        dataset, model, iterations=12, warmup_iterations=2, checkpoint_interval=5, **more
    )
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)})
    run = (
        train(config, tmp_path).path
        if ranks == 1
        else run_threads(lambda: train(config, tmp_path).path, ranks)[0]
    )
    again = [*metrics(run), *checkpoints(run)]
    assert sum(isinstance(each, Remade) for each in again) > 20
    assert not [each for each in again if isinstance(each, Absent)]
    assert [
        sentence
        for each in again
        for sentence in (unlike(*each) if isinstance(each, Remade) else [each])
    ] == []
