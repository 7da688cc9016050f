"""Names and row orders of Hugging Face GPT-2 directories (`GPT2LMHeadModel`).

Their linear weights are [in, out] (Conv1D), ours [out, in]. The rows of their `c_attn` are [3, n, d], ours [n, 3, d]
(transformers, `models/gpt2/modeling_gpt2.py`). `engine/compare/names/transformers.toml` lists names and row orders.
Shapes: n heads, d head dim.
"""

import re

import torch
from torch import Tensor

from mlm_repro.engine.compare.recorder import read_names
from mlm_repro.engine.config import ModelConfig
from mlm_repro.lineage.atomic import JSON

NAMES = read_names("transformers")
PREFIX = "transformer."
OUR_WORDS = "embedding.word_embeddings.weight"
WORDS = "wte.weight"
TIED = {"lm_head.weight": WORDS}
"""Copy → weight."""
OPTIONAL = ()
"""Beginnings of the names that a directory may lack."""
SIZES = {"num_layers": "n_layer", "hidden_size": "n_embd", "num_heads": "n_head", "seq_length": "n_positions"}
"""Our sizes → keys of config.json."""
INNER, DROPOUT = ("n_inner", None), "resid_pdrop"
"""Key of the width between the products of the MLP, with its default, and key of dropout."""
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


def join(name: str, parts: list[Tensor], config: ModelConfig) -> Tensor:
    """Our tensor from theirs. Padding rows of the vocabulary are zeros."""
    (tensor,) = parts
    if name == OUR_WORDS:
        padding = tensor.new_zeros(config.padded_vocab_size - config.vocab_size, tensor.size(1))
        return torch.cat([tensor[: config.vocab_size], padding])
    return NAMES.in_our_order(name, tensor, config.num_heads)


def split(name: str, tensor: Tensor, config: ModelConfig) -> list[Tensor]:
    """The inverse of `join`."""
    tensor = tensor[: config.vocab_size] if name == OUR_WORDS else tensor
    return [NAMES.in_their_order(name, tensor, config.num_heads).contiguous()]


def their_config(config: ModelConfig) -> JSON:
    """The model as transformers' `GPT2Config`."""
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
        "n_layer": config.num_layers, "n_embd": config.hidden_size, "n_head": config.num_heads, "n_inner": None,
        "n_positions": config.seq_length, "n_ctx": config.seq_length, "vocab_size": config.vocab_size,
        "layer_norm_epsilon": 1e-5, "attn_pdrop": config.dropout, "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout, "initializer_range": config.init_std, "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True, "torch_dtype": "float32",
    }  # fmt: skip
