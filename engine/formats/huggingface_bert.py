"""Names and row orders of Hugging Face BERT directories (`BertForPreTraining`).

Their BERT has the original order of layer norms. The norm that closes one of their blocks opens the next of ours
(`engine/families/bert/model.py`): their embedding's norm is our first layer's, and their last layer's norm is our final
one. Query, key and value are three tensors there and one tensor [n, 3, d] here. Heads that a directory lacks (a bare
`BertModel` has no `cls`) become zeros and are left out again on the way back. Shapes: n heads, d head dim.
"""

import re
from pathlib import Path

import torch
from torch import Tensor

from mlm_repro.engine.compare.recorder import read_names
from mlm_repro.engine.config import ModelConfig
from mlm_repro.lineage.atomic import JSON

NAMES = read_names(str(Path(__file__).with_suffix(".toml")))
PREFIX = "bert."
SIZES = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_heads": "num_attention_heads",
    "seq_length": "max_position_embeddings",
}  # fmt: skip
"""Our sizes → keys of config.json."""
INNER, DROPOUT = ("intermediate_size", 3072), "hidden_dropout_prob"
"""Key of the width between the products of the MLP, with its default, and key of dropout."""
BUFFER = re.compile(r"embeddings\.(position_ids|token_type_ids)")
"""Tensors that are not weights."""
WORDS = "embeddings.word_embeddings.weight"
OVER_VOCABULARY = ("embedding.word_embeddings.weight", "masked_head.bias")
"""Our tensors with a row for each word, whose rows beyond the vocabulary are padding."""
TIED = {"cls.predictions.decoder.weight": WORDS, "cls.predictions.decoder.bias": "cls.predictions.bias"}
"""Copy → weight."""
OPTIONAL = ("cls.", "pooler.")
"""Beginnings of the names that a directory may lack."""
REQUIRED = {
    "hidden_act": ("gelu",), "position_embedding_type": ("absolute",), "type_vocab_size": (2,),
    "is_decoder": (False,), "add_cross_attention": (False,),
}  # fmt: skip
"""Allowed values of settings that would make another model, the default first."""


def their_names(name: str, config: ModelConfig) -> list[str]:
    """Names of Hugging Face's tensors that make up one of ours."""
    if theirs := NAMES.theirs(name):
        return [theirs]
    layer, inner = re.fullmatch(r"(?:layers\.(\d+)\.)?(.*)", name).groups()  # type: ignore[union-attr]
    module, _, kind = inner.rpartition(".")
    if module in ("input_layernorm", "final_layernorm"):
        before = int(layer or config.num_layers) - 1
        return [f"encoder.layer.{before}.output.LayerNorm.{kind}" if before >= 0 else f"embeddings.LayerNorm.{kind}"]
    return [f"encoder.layer.{layer}.attention.self.{part}.{kind}" for part in ("query", "key", "value")]


def join(name: str, parts: list[Tensor], config: ModelConfig) -> Tensor:
    """Our tensor from theirs. Padding rows of the vocabulary are zeros."""
    if len(parts) == 3:
        return torch.stack([part.unflatten(0, (config.num_heads, config.head_dim)) for part in parts], 1).flatten(0, 2)
    (tensor,) = parts
    if name in OVER_VOCABULARY:
        padding = tensor.new_zeros(config.padded_vocab_size - config.vocab_size, *tensor.shape[1:])
        return torch.cat([tensor, padding])
    return tensor


def split(name: str, tensor: Tensor, config: ModelConfig) -> list[Tensor]:
    """The inverse of `join`."""
    if "query_key_value" in name:
        parts = tensor.unflatten(0, (config.num_heads, 3, config.head_dim)).unbind(1)
        return [part.flatten(0, 1).contiguous() for part in parts]
    return [tensor[: config.vocab_size].contiguous() if name in OVER_VOCABULARY else tensor]


def their_config(config: ModelConfig) -> JSON:
    """The model as transformers' `BertConfig`."""
    return {
        "architectures": ["BertForPreTraining"], "model_type": "bert", "hidden_act": "gelu",
        "num_hidden_layers": config.num_layers, "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads, "intermediate_size": config.inner_size,
        "max_position_embeddings": config.seq_length, "vocab_size": config.vocab_size, "type_vocab_size": 2,
        "layer_norm_eps": config.bert.layer_norm_epsilon, "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout, "initializer_range": config.init_std,
        "torch_dtype": "float32",
    }  # fmt: skip
