"""A small random model of every kind of causal language model that transformers builds from a
generic configuration."""

import inspect
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.evaluation.test_pretrained import byte_level

LARGEST = 2_000_000
"""Most parameters of a model that counts as small."""
SIZES = {
    32: ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "moe_intermediate_size"),
    64: (
        "intermediate_size",
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "decoder_ffn_dim",
        "encoder_ffn_dim",
        "ffn_dim",
        "dim_ff",
        "d_inner",
    ),
    2: (
        "num_hidden_layers",
        "num_key_value_heads",
        "n_layer",
        "n_layers",
        "num_layers",
        "decoder_layers",
        "encoder_layers",
        "num_experts_per_tok",
        "expand",
    ),
    4: (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "decoder_attention_heads",
        "encoder_attention_heads",
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
    ),
    8: ("head_dim", "state_size"),
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}


def build(kind: str) -> Any:
    """A random model of a kind. Raises what transformers raises where generic sizes do not fit each
    other."""
    described = CONFIG_MAPPING[kind]
    known = set(inspect.signature(described.__init__).parameters)
    known.update(*(getattr(each, "__annotations__", ()) for each in described.__mro__))
    sizes = {name: size for size, names in SIZES.items() for name in names if name in known}
    with suppress(TypeError):
        sizes |= {name: token for name, token in SPECIAL.items() if name in known}
    config = described(vocab_size=300, **sizes)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    if sum(parameter.numel() for parameter in empty.parameters()) > LARGEST:
        raise ValueError("large")
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(4)
    with torch.inference_mode():
        assert model(input_ids=torch.arange(20)[None], use_cache=False).logits.isfinite().all()
    return model


def models(folder: Path) -> Iterator[tuple[str, Any, Path]]:
    """Each kind that can be built, its model and the directory that it is saved to."""
    transformers.utils.logging.set_verbosity_error()
    tokenizer = byte_level()
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            model = build(kind)
            model.save_pretrained(folder / kind)
        except Exception:
            continue
        tokenizer.save_pretrained(folder / kind)
        yield kind, model, folder / kind
