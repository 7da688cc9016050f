"""Agreement with `transformers` on the same weights, target by target, without batches or windows."""

import itertools
import math

import numpy as np
import pytest
import torch

from engine.model.gpt2 import GPT2
from evaluation.scoring import score
from tests.evaluation.standins import scoring_model, tiny_config, tiny_gpt2
from tests.evaluation.test_tasks import sliding_task

transformers = pytest.importorskip("transformers")

TEXT = "A short text with some words , numbers 1 @,@ 234 and a few more words to slide along . " * 2


def transplanted(model: GPT2) -> torch.nn.Module:
    """The `transformers` GPT-2 with the weights of ours."""
    config = model.config
    outsider = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.padded_vocab_size,
            n_positions=config.seq_length,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_heads,
        )
    ).eval()
    ours = dict(model.named_parameters())
    weights: dict[str, torch.Tensor] = {
        "wte.weight": ours["embedding.word_embeddings.weight"],
        "wpe.weight": ours["embedding.position_embeddings.weight"],
        "ln_f.weight": ours["final_layernorm.weight"],
        "ln_f.bias": ours["final_layernorm.bias"],
    }
    names = {
        "ln_1": "input_layernorm",
        "attn.c_attn": "self_attention.query_key_value",
        "attn.c_proj": "self_attention.dense",
        "ln_2": "post_attention_layernorm",
        "mlp.c_fc": "mlp.dense_h_to_4h",
        "mlp.c_proj": "mlp.dense_4h_to_h",
    }
    for layer in range(config.num_layers):
        for theirs, name in names.items():
            for part in ("weight", "bias"):
                tensor: torch.Tensor = ours[f"layers.{layer}.{name}.{part}"]
                if theirs == "attn.c_attn":  # rows [n, 3, d] become [3, n, d]
                    by_head = tensor.unflatten(0, (config.num_heads, 3, config.head_dim))
                    tensor = by_head.transpose(0, 1).flatten(0, 2)
                weights[f"h.{layer}.{theirs}.{part}"] = tensor.T if tensor.dim() == 2 else tensor
    missing, unexpected = outsider.transformer.load_state_dict(weights, strict=False)
    assert not unexpected
    assert not [name for name in missing if "bias" not in name]
    return outsider


def test_perplexity_is_that_of_a_plain_loop_in_transformers() -> None:
    config = tiny_config(vocab_size=256, seq_length=64)
    model = tiny_gpt2(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(len(name)))
    task = sliding_task(TEXT, config.seq_length)
    scores = score(scoring_model(model, 256, config.seq_length), task.requests, workers=1)

    tokens = np.frombuffer(TEXT.encode(), dtype=np.uint8).astype(np.int64)
    outsider = transplanted(model)
    stride = config.seq_length // 32
    expected = []
    with torch.no_grad():
        for target in range(1, task.stream.num_tokens):
            start = stride * max(0, math.ceil((target - config.seq_length) / stride))
            logits = outsider(torch.from_numpy(tokens[start:target])[None]).logits[0, -1, :256]
            expected.append(-torch.log_softmax(logits.double(), 0)[tokens[target]].item())
    bounds = np.cumsum([0, *(request.num_scored for request in task.requests)])
    by_window = [sum(expected[a:b]) for a, b in itertools.pairwise(bounds)]
    np.testing.assert_allclose(scores.nll, by_window, rtol=1e-4)
    assert math.fsum(scores.nll) == pytest.approx(math.fsum(expected), rel=1e-6)
