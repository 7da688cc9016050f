"""A checkpoint is loaded in the number format of its weights and scored in it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from engine.checkpoint.checkpoint import TrainingState, save_checkpoint
from engine.checkpoint.shards import stored_dtype
from engine.config import DataSection, RunConfig
from engine.optim.adam import FlatAdamW
from engine.parallel.sharding import sharded_parameters
from evaluation.checkpoints import load_checkpoint
from evaluation.scoring import score
from lineage.errors import IntegrityFailure
from lineage.run import RunDirectory
from tests.evaluation.standins import tiny_config, tiny_gpt2, write_dataset
from tests.evaluation.test_scoring import random_requests


def write_run_in(root: Path, dtype: torch.dtype) -> Path:
    write_dataset(root / "words")
    config = RunConfig(name="tiny", model=tiny_config(vocab_size=300), data=DataSection(dataset=root / "words"))
    run = RunDirectory.begin(root, config.name, "training", config.model_dump(mode="json"), {"dataset": "d"})
    model = tiny_gpt2(config.model).to(dtype)
    parameters = sharded_parameters(model, model.mesh)
    optimizer = FlatAdamW(parameters, config.train, model.mesh)
    state = TrainingState(iteration=10)
    save_checkpoint(run.path, config, state, parameters, optimizer, model.mesh, root / "words" / "tokenizer")
    return run.path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_runs_in_its_own_format_with_a_float32_softmax(tmp_path: Path, dtype: torch.dtype) -> None:
    model = load_checkpoint(write_run_in(tmp_path, dtype)).model
    assert model.dtype == dtype
    assert {parameter.dtype for parameter in model.network.parameters()} == {dtype}
    requests = random_requests(12)
    found = score(model, requests, 1, workers=1)
    plain = []
    with torch.no_grad():
        for request in requests:
            tokens = torch.from_numpy(request.tokens)
            logits = model.network.logits(model.network.hidden_states(tokens[None, :-1]))[:, 0, : model.vocab_size]
            assert logits.dtype == dtype
            losses = F.cross_entropy(logits.double(), tokens[1:], reduction="none")
            plain.append(-losses[-request.num_scored :].numpy())
    tolerance = 1e-5 if dtype == torch.float32 else 0.1  # logits have 8 or 11 bits, the softmax more
    np.testing.assert_allclose(found.log_probabilities, np.concatenate(plain), atol=tolerance)
    exact = score(load_checkpoint(write_run_in(tmp_path / "exact", torch.float32)).model, requests, 1, workers=1)
    np.testing.assert_allclose(found.nll.sum(), exact.nll.sum(), rtol=1e-2)


def test_weights_in_no_training_format_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(3, dtype=torch.int32)}, tmp_path / "model.safetensors")
    index = {"weight": {"shape": [3], "dim": None, "files": ["model.safetensors"]}}
    with pytest.raises(IntegrityFailure, match="holds I32 numbers"):
        stored_dtype(tmp_path, index)
    with pytest.raises(IntegrityFailure, match="cannot be read"):
        stored_dtype(tmp_path, {})
    index["weight"]["files"] = ["gone.safetensors"]
    with pytest.raises(IntegrityFailure, match="cannot be read"):
        stored_dtype(tmp_path, index)
