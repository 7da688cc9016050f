"""The GPT-2 of transformers and of nanoGPT with this engine's weights, and the optimizer that such programs use.

nanoGPT has fused attention, one loss over all logits, a tied head; biases everywhere, as GPT-2 has. Shapes: b batch,
s sequence, h hidden, n heads, d head dim, v vocabulary; activations are [b, s, h].
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional as F

from engine.config import ModelConfig, TrainConfig
from engine.formats.huggingface import gpt2_weights
from engine.formats.huggingface_gpt2 import their_config
from engine.model.gpt2 import GPT2
from lineage.extras import import_extra

Loss = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
"""(model, token ids [b, s], targets [b, s]) → mean loss."""


def huggingface(config: ModelConfig) -> tuple[torch.nn.Module, Loss]:
    """Return transformers' GPT2LMHeadModel, with its own initial values, and its loss."""
    transformers = import_extra("transformers", "bench")
    settings = transformers.GPT2Config(**their_config(config), bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(settings)

    def loss(module: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = module(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return model, loss


class _Attention(nn.Module):
    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.heads, self.c_attn, self.c_proj = heads, nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout.p, is_causal=True)  # [b, n, s, d]
        return self.dropout(self.c_proj(mixed.transpose(1, 2).flatten(2)))


class _FeedForward(nn.Module):
    def __init__(self, h: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))


class _Block(nn.Module):
    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(h), _Attention(h, heads)
        self.ln_2, self.mlp = nn.LayerNorm(h), _FeedForward(h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPTModel(nn.Module):
    """nanoGPT's model, called with token ids and targets [b, s] for the mean loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        h = config.hidden_size
        self.wte, self.wpe = nn.Embedding(config.vocab_size, h), nn.Embedding(config.seq_length, h)
        self.dropout = nn.Dropout(0.0)
        self.h = nn.ModuleList(_Block(h, config.num_heads) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(h)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device)))
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)  # [b, s, v]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def load_theirs(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load weights in transformers' names and order."""
        for name, parameter in self.named_parameters():
            whole = weights[f"transformer.{name}"]
            with torch.no_grad():
                parameter.copy_(whole.T if ".c_" in name and whole.dim() == 2 else whole)


def their_weights(network: GPT2) -> dict[str, torch.Tensor]:
    """Return a whole network's weights in transformers' names and order."""
    return gpt2_weights(dict(network.named_parameters()), network.config)


def adamw(model: torch.nn.Module, train: TrainConfig, fused: bool = False) -> torch.optim.AdamW:
    """Return torch's optimizer as such programs set it: parameters of one dim are not decayed."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    betas = (train.adam_beta1, train.adam_beta2)
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, eps=train.adam_epsilon, fused=fused)
