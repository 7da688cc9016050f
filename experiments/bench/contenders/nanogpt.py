"""GPT-2 as nanoGPT defines it: fused attention, one loss over all logits, tied head; biases everywhere, as GPT-2 has.

Shapes: b batch, s sequence, h hidden, n heads, d head dim, v vocabulary; activations are [b, s, h].
"""

import torch
import torch.nn.functional as F
from torch import nn

from engine.config import ModelConfig


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


class NanoGPT(nn.Module):
    """The model, called with token ids and targets [b, s] for the mean loss."""

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
