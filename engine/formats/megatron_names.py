"""Names and row orders of weights in Megatron-LM's files since 2019, and ours.

Sources: Megatron-LM `megatron/checkpointing.py` (checkpoint versions), `model/language_model.py` and
`model/transformer.py` of v1.0, v2.6 and 2023, `megatron/core/models/gpt`. Layer numbers are local to a pipeline stage.
"""

import re
from typing import Any

import torch

from engine.formats import check_settings
from lineage.errors import BadInput, IntegrityFailure

IN_LAYER = {
    "input_layernorm": ("input_layernorm", "input_norm"),
    "self_attention.query_key_value": (
        "self_attention.query_key_value",
        "attention.query_key_value",
        "self_attention.linear_qkv",
    ),
    "self_attention.dense": ("self_attention.dense", "attention.dense", "self_attention.linear_proj"),
    "post_attention_layernorm": ("post_attention_layernorm", "post_attention_norm", "pre_mlp_layernorm"),
    "mlp.dense_h_to_4h": ("mlp.dense_h_to_4h", "mlp.linear_fc1"),
    "mlp.dense_4h_to_h": ("mlp.dense_4h_to_h", "mlp.linear_fc2"),
}
"""Our module in a layer → its names in Megatron-LM."""

FUSED = {"self_attention.linear_qkv.layer_norm_": "input_layernorm.", "mlp.linear_fc1.layer_norm_":
         "post_attention_layernorm."}  # fmt: skip
"""Layer norms that Transformer Engine keeps in the linear layer that follows."""

OURS = {theirs: ours for ours, several in IN_LAYER.items() for theirs in several}
LAYER = re.compile(r"(?:transformer|encoder|decoder)\.layers\.(\d{1,6})\.(.+)")
FINAL = re.compile(r"(?:transformer|encoder|decoder)\.final_(?:layernorm|norm)\.(weight|bias)")
EMBEDDING = re.compile(r"(?:embedding\.)?((?:word|position)_embeddings\.weight)")
HEADS = ("word_embeddings_for_head.weight", "output_layer.weight")

HEAD = "head"
"""Our name for the last pipeline stage's copy of the word embedding."""


def flatten(values: dict[Any, Any], prefix: str = "", depth: int = 5) -> dict[str, Any]:
    """Nested state dicts as one with dotted names, without `module.`, `model.` and `language_model.`."""
    named: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and depth:
            named |= flatten(value, f"{prefix}{key}.", depth - 1)
        else:
            named[re.sub(r"^((module|model|language_model)\.)+", "", f"{prefix}{key}")] = value
    return named


def our_names(model: Any, where: object) -> dict[str, torch.Tensor]:
    """The tensors of one file's `model` entry by our names, with layers numbered within the stage.

    Raises IntegrityFailure for a name that no version of Megatron-LM's GPT-2 had, and for a value that is not a tensor.
    """
    if not isinstance(model, dict):
        raise IntegrityFailure(f"{where}: its model is not a state dict")
    tensors: dict[str, torch.Tensor] = {}
    for name, value in flatten(model).items():
        if name.endswith("_extra_state"):
            continue
        ours = _our_name(name)
        if ours is None:
            raise IntegrityFailure(f"{where}: tensor {name!r} is unexpected")
        if ours in tensors:
            raise IntegrityFailure(f"{where}: tensor {name!r} is there twice")
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type != "cpu":
            raise IntegrityFailure(f"{where}: {name!r} is not a tensor with values")
        tensors[ours] = value.detach()
    return tensors


def _our_name(name: str) -> str | None:
    if match := EMBEDDING.fullmatch(name):
        return f"embedding.{match[1]}"
    if match := FINAL.fullmatch(name):
        return f"final_layernorm.{match[1]}"
    if name in HEADS:
        return HEAD
    if not (match := LAYER.fullmatch(name)):
        return None
    number, inner = match.groups()
    for theirs, ours in FUSED.items():
        inner = inner.replace(theirs, ours) if inner.startswith(theirs) else inner
    module, _, kind = inner.rpartition(".")
    module = OURS.get(module, module)
    return f"layers.{int(number)}.{module}.{kind}" if module in IN_LAYER else None


def reorder_query_key_value(local: torch.Tensor, version: int, heads: int) -> torch.Tensor:
    """Reorder the rows of a tensor-parallel rank's weight or bias to ours, [n, 3, d].

    `heads` is n, the rank's heads. Rows are [3, n, d] in version 0 and [n, d, 3] in version 1.
    """
    d = local.size(0) // (3 * heads)
    if version == 0:
        return local.unflatten(0, (3, heads, d)).transpose(0, 1).flatten(0, 2)
    if version == 1:
        return local.unflatten(0, (heads, d, 3)).transpose(1, 2).flatten(0, 2)
    return local


REQUIRED = {
    "swiglu": (False,),
    "squared_relu": (False,),
    "normalization": ("LayerNorm",),
    "apply_layernorm_1p": (False,),
    "layernorm_epsilon": (1e-5,),
    "norm_epsilon": (1e-5,),
    "apply_residual_connection_post_layernorm": (False,),
    "position_embedding_type": ("learned_absolute",),
    "add_position_embedding": (True,),
    "untie_embeddings_and_output_weights": (False,),
    "group_query_attention": (False,),
    "multi_latent_attention": (False,),
    "add_bias_linear": (True,),
}
"""GPT-2's values of arguments that would make another model."""


def require_gpt2(args: dict[str, Any], where: object) -> None:
    """Raise BadInput if the arguments describe a model other than our GPT-2.

    A version that can choose has the exact GeLU, not GPT-2's tanh, unless it took the fused or the OpenAI one.
    """
    check_settings(args, REQUIRED, where)
    if args.get("num_experts"):
        raise BadInput(f"{where}: num_experts is {args['num_experts']!r}; a dense model can be imported")
    choices = [args[name] for name in ("bias_gelu_fusion", "openai_gelu") if name in args]
    if choices and not any(choices):
        raise BadInput(f"{where}: the model was trained with the exact GeLU; one with GPT-2's tanh can be imported")
