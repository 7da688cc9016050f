"""A small Qwen3 of torchtitan, with experts, divided as its trainer divides it, for `mlm-verify
layouts PATH.py:build`.

Layers, plans and dispatcher are torchtitan's own; attention and grouped products, which need a GPU,
have stand-ins. Written for commits of summer 2026, such as ecae62f159; it needs `spmd_types`.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

WORDS = 64
HIDDEN = 32
sys.modules.setdefault("tyro", MagicMock())
trainer = sys.modules.setdefault("torchtitan.trainer", MagicMock())  # models ask it for one class
trainer.Trainer.Config = type("Config", (), {})
# Torchtitan takes CUDA where there is no accelerator.
vars(torch._utils)["_get_available_device_type"] = lambda: "cpu"
Tensor.bfloat16 = Tensor.double  # type: ignore[method-assign]  # experts round to bf16 on purpose
batch = torch.randint(0, WORDS, (8, 17), generator=torch.Generator().manual_seed(1))


def grouped_product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Return [rows, out], each row of `a` times the matrix of its expert in `b` [experts, in, out]:
    expert i has the rows before `offs[i]` that no earlier expert has; rows behind the last offset
    give zeros."""
    sizes = torch.diff(offs, prepend=offs.new_zeros(1)).tolist()
    products = [rows @ matrix for rows, matrix in zip(a[: sum(sizes)].split(sizes), b, strict=True)]
    return torch.cat([*products, a.new_zeros(len(a) - sum(sizes), b.shape[-1])])


def count(
    of: Tensor, *args: Any, kept: Callable[..., Tensor] = torch.histc, **named: Any
) -> Tensor:
    """Return `torch.histc` of the tensor `of`, with the other arguments passed on, computed in
    float64, because torch's own function takes no integers on a CPU; the result has the tensor's
    type. `kept` is torch's function, which this one replaces."""
    return kept(of.double(), *args, **named).to(of.dtype)


vars(torch).update(_grouped_mm=grouped_product, histc=count)


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of `model` on the next words of this rank's `rows`,
    token ids [b, s + 1], as a scalar tensor. The gradient of this tensor is the gradient of the
    mean, divided by the model's attribute `data_ranks`, which the caller has set to the number of
    data-parallel ranks; without this attribute it is not divided.

    torchtitan divides by the tokens of the whole batch and adds gradients up.
    """
    logits: Any = model(rows[:, :-1])
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    mean = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    share = mean / getattr(model, "data_ranks", 1)
    return share + (mean - share).detach()


def build(layout: Any) -> nn.Module:
    """Return torchtitan's Qwen3 with experts, two small layers with the same random weights at each
    call: this rank's part by the sizes tp, fsdp, dp and ep of `layout`, or the whole model if the
    caller made no process group. `mlm-verify layouts` calls it, on every rank. Weights have torch's
    default type, which the caller has set to float64. Patches torchtitan's modules in this process,
    and seeds torch's generator."""
    qwen3 = import_module("torchtitan.models.qwen3")
    configs = import_module("torchtitan.config")
    attention = import_module("torchtitan.models.common.attention").ScaledDotProductAttention
    vars(qwen3)["get_attention_config"] = lambda _: attention.Config()  # the others need a GPU
    configs.TORCH_DTYPE_MAP["float32"] = torch.float64
    torch.manual_seed(1)
    drawn = {"weight": partial(nn.init.normal_, std=0.02)}
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=2,
        dim=HIDDEN,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        moe_hidden_dim=16,
        num_experts=4,
        top_k=2,
        attn_backend="",
        moe_comm_backend="standard",
        rope=qwen3.CosSinRoPE.Config(dim=8, max_seq_len=64),
    )
    config = qwen3.Qwen3Model.Config(
        vocab_size=WORDS,
        dim=HIDDEN,
        norm=qwen3._qwen3_norm(HIDDEN),
        layers=layers,
        tok_embeddings=qwen3.Embedding.Config(
            num_embeddings=WORDS, embedding_dim=HIDDEN, param_init=drawn
        ),
        lm_head=qwen3.Linear.Config(in_features=HIDDEN, out_features=WORDS, param_init=drawn),
    )
    by_experts = layout.ep > 1
    parallelism = configs.ParallelismConfig(
        tensor_parallel_degree=layout.tp,
        expert_parallel_degree=layout.ep,
        data_parallel_shard_degree=layout.dp if by_experts else layout.fsdp,
        data_parallel_replicate_degree=1 if by_experts else layout.dp,
    )
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    model = config.build()
    with torch.no_grad():
        # Whole: DTensors draw the same parts on CPU ranks.
        model.init_weights(buffer_device=torch.device("cpu"))
    model.train()
    if dist.is_initialized():
        dims = import_module("torchtitan.distributed").ParallelDims.from_config(
            parallelism, dist.get_world_size()
        )
        dims.build_mesh()
        plain = configs.TrainingConfig(
            mixed_precision_param="float32", mixed_precision_reduce="float32"
        )
        model = qwen3.parallelize_qwen3(
            model,
            parallel_dims=dims,
            training=plain,
            parallelism=parallelism,
            compile_config=configs.CompileConfig(),
            ac_config=None,
            dump_folder="",
        )
        model.data_ranks = layout.dp * layout.fsdp
    whole: nn.Module = model
    return whole
