"""A text scored with memory: as one pass over the whole text, in which every state sees what its
segment saw."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from mlm_repro.engine.config import ModelConfig
from mlm_repro.engine.families.transformer_xl.model import TransformerXL
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.evaluation.protocol import Request
from mlm_repro.evaluation.scoring.scores import ScoringModel, score_with_memory
from mlm_repro.lineage.errors import BadInput
from tests.evaluation.standins import scoring_model, tiny_config, tiny_gpt2

SEGMENT = 7


def build(memory_length: int) -> ScoringModel:
    config = ModelConfig(
        family="transformer-xl",
        num_layers=3,
        hidden_size=16,
        num_heads=2,
        seq_length=SEGMENT,
        vocab_size=50,
        padded_vocab_size=64,
        init_std=0.3,
        transformer_xl={"memory_length": memory_length},  # type: ignore[arg-type]
    )
    network = TransformerXL(config, serial_mesh()).double().eval()
    network.initialize(5)
    return ScoringModel(network, 50, SEGMENT, 16, torch.float64)


def segments_of(tokens: np.ndarray) -> list[Request]:  # type: ignore[type-arg]
    cuts = [*range(0, len(tokens) - 1, SEGMENT), len(tokens) - 1]
    return [Request(tokens[start : stop + 1], stop - start) for start, stop in pairwise(cuts)]


@pytest.mark.parametrize("memory_length", [3, 7, 16, 100])
def test_memory_equals_recomputing_everything(
    memory_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By brute force: every layer over the whole text at once, masked to what each token's segment
    and memory held."""
    model = build(memory_length)
    tokens = np.random.RandomState(1).randint(0, 50, 40)
    scores = score_with_memory(model, segments_of(tokens))
    length = len(tokens) - 1
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    hidden_from_view = key < query // SEGMENT * SEGMENT - memory_length
    softmax = torch.softmax

    def masked(scores: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        return softmax(scores.masked_fill(hidden_from_view, float("-inf")), dim=dim, dtype=dtype)

    monkeypatch.setattr(torch, "softmax", masked)
    with torch.no_grad():
        hidden = model.network(torch.from_numpy(tokens[None, :-1]))
        logits = model.network.logits(hidden)[:, 0, :50].float()
    expected = F.log_softmax(logits.double(), dim=-1)[
        torch.arange(length), torch.from_numpy(tokens[1:])
    ]
    np.testing.assert_allclose(scores.log_probabilities, expected.numpy(), rtol=0, atol=1e-5)


def test_a_model_without_memory_is_refused() -> None:
    tokens = np.arange(20)
    for model in (scoring_model(tiny_gpt2(tiny_config()), 61), build(0)):
        with pytest.raises(BadInput, match="a Transformer-XL with memory_length above 0"):
            score_with_memory(model, segments_of(tokens))
