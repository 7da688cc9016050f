"""A checkpoint is loaded in the number format of its weights and scored in it."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from mlm_repro.evaluation.checkpoints import load_checkpoint, open_checkpoint
from mlm_repro.evaluation.models.places import Place, weight_files
from mlm_repro.evaluation.scoring.scores import score
from mlm_repro.evaluation.settings import Settings
from mlm_repro.lineage import chain
from mlm_repro.lineage.chain import complete_checkpoints
from tests.evaluation.standins import write_run
from tests.evaluation.test_scoring import random_requests


def test_a_place_is_found_once_and_again_only_if_a_training_removed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path)
    kept = complete_checkpoints(run)[0]
    newest = Path(shutil.copytree(kept, kept.with_name("iter_0000020")))
    found: list[Path] = []
    monkeypatch.setattr(
        chain, "complete_checkpoints", lambda run: found.append(run) or complete_checkpoints(run)
    )
    place = Place.find(run)
    assert open_checkpoint(place, Settings()).directory == newest
    assert len(found) == 1
    shutil.rmtree(newest)
    assert open_checkpoint(place, Settings()).directory == kept
    assert len(found) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_runs_in_its_own_format_with_a_float32_softmax(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = load_checkpoint(write_run(tmp_path, dtype=dtype)).model
    assert model.dtype == dtype
    assert {parameter.dtype for parameter in model.network.parameters()} == {dtype}
    requests = random_requests(12)
    found = score(model, requests, 1, workers=1)
    plain = []
    with torch.no_grad():
        for request in requests:
            tokens = torch.from_numpy(request.tokens)
            logits = model.network.logits(model.network(tokens[None, :-1]))[
                :, 0, : model.vocab_size
            ]
            assert logits.dtype == dtype
            losses = F.cross_entropy(logits.double(), tokens[1:], reduction="none")
            plain.append(-losses[-request.num_scored :].numpy())
    # Logits have 8 or 11 bits, the softmax more.
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    np.testing.assert_allclose(found.log_probabilities, np.concatenate(plain), atol=tolerance)
    exact = score(load_checkpoint(write_run(tmp_path / "exact")).model, requests, 1, workers=1)
    np.testing.assert_allclose(found.nll.sum(), exact.nll.sum(), rtol=1e-2)


def test_a_gguf_file_is_not_scored_by_weights_that_lie_beside_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    assert Place.find(tmp_path).is_gpt2  # this engine reads it
    (tmp_path / "model.gguf").touch()
    assert not Place.find(tmp_path / "model.gguf").is_gpt2


def test_a_gguf_file_of_any_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "model[1].gguf").touch()
    (tmp_path / "model1.gguf").touch()
    assert weight_files(tmp_path, "model[1].gguf") == [tmp_path / "model[1].gguf"]
