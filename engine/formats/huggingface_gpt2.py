"""Names and row orders of Hugging Face GPT-2 directories (`GPT2LMHeadModel`).

Their linear weights are [in, out] (Conv1D), ours [out, in]. The rows of their `c_attn` are [3, n, d], ours [n, 3, d]
(transformers, `models/gpt2/modeling_gpt2.py`). `engine/compare/names/transformers.toml` lists names and row orders.
Shapes: n heads, d head dim.
"""

import re
from pathlib import Path
from typing import Any

import torch

from mlm_repro.data_pipeline.tokens.tokenizer import padded_vocab_size
from mlm_repro.engine.compare.recorder import read_names
from mlm_repro.engine.config import ModelConfig
from mlm_repro.engine.formats import check_settings
from mlm_repro.lineage.config import parse_config
from mlm_repro.lineage.errors import BadInput

NAMES = read_names("transformers")
PREFIX = "transformer."
OUR_WORDS = "embedding.word_embeddings.weight"
WORDS = "wte.weight"
TIED = {"lm_head.weight": WORDS}
"""Copy → weight."""
OPTIONAL = ()
"""Beginnings of the names that a directory may lack."""
SIZES = ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")
"""Keys of config.json that must be numbers."""
BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
"""Tensors that are not weights: the causal mask, in old files."""
REQUIRED = {
    "model_type": ("gpt2",), "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "layer_norm_epsilon": (1e-5,), "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}  # fmt: skip
"""Allowed values of settings that would make another model, the default first."""


def their_names(name: str, config: ModelConfig) -> list[str]:
    """Names of Hugging Face's tensors that make up one of ours. Raises KeyError if GPT-2 has no such parameter."""
    if (theirs := NAMES.theirs(name)) is None:
        raise KeyError(name)
    return [theirs.removeprefix(PREFIX)]


def join(name: str, parts: list[torch.Tensor], config: ModelConfig) -> torch.Tensor:
    """Our tensor from theirs. Padding rows of the vocabulary are zeros."""
    (tensor,) = parts
    if name == OUR_WORDS:
        padding = tensor.new_zeros(config.padded_vocab_size - config.vocab_size, tensor.size(1))
        return torch.cat([tensor[: config.vocab_size], padding])
    return NAMES.in_our_order(name, tensor, config.num_heads)


def split(name: str, tensor: torch.Tensor, config: ModelConfig) -> list[torch.Tensor]:
    """The inverse of `join`."""
    tensor = tensor[: config.vocab_size] if name == OUR_WORDS else tensor
    return [NAMES.in_their_order(name, tensor, config.num_heads).contiguous()]


def our_config(values: dict[str, Any], vocab_size: int, path: Path) -> ModelConfig:
    """The model that a `GPT2Config` describes. Raises BadInput if a setting makes it another model."""
    check_settings(values, REQUIRED, path)
    if values.get("n_inner") not in (None, 4 * values["n_embd"]):
        raise BadInput(f"{path}: n_inner is {values['n_inner']!r}; four times n_embd can be imported")
    ours = {
        "num_layers": values["n_layer"], "hidden_size": values["n_embd"], "num_heads": values["n_head"],
        "seq_length": values["n_positions"], "vocab_size": vocab_size,
        "padded_vocab_size": padded_vocab_size(vocab_size), "dropout": values.get("resid_pdrop", 0.1),
        "init_std": values.get("initializer_range", 0.02),
    }  # fmt: skip
    return parse_config(ours, ModelConfig, str(path))


def their_config(config: ModelConfig) -> dict[str, Any]:
    """The model as transformers' `GPT2Config`."""
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
        "n_layer": config.num_layers, "n_embd": config.hidden_size, "n_head": config.num_heads, "n_inner": None,
        "n_positions": config.seq_length, "n_ctx": config.seq_length, "vocab_size": config.vocab_size,
        "layer_norm_epsilon": 1e-5, "attn_pdrop": config.dropout, "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout, "initializer_range": config.init_std, "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True, "torch_dtype": "float32",
    }  # fmt: skip
