"""BERT as Megatron-LM trains it: masked tokens, sentence order, and two orders of layer norms.

*Rearranged* (2019 paper, Section 5.3, Figure 7 b) is x + f(LN(x)). *Original* (Figure 7 a, Devlin
et al. 2019) is LN(x + f(x)), which equals the first with the residual taken after the norm: the
norm that closes a block of one order opens the next block of the other. So both have the same
parameters and names.

GeLU is exact (erf). Shapes: b microbatch, s sequence, h hidden, n heads, d head dim, v padded
vocabulary, t tensor-parallel ranks, m masked positions of the microbatch.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlm_repro.engine.config import ModelConfig
from mlm_repro.engine.kernels.cross_entropy import vocab_parallel_cross_entropy
from mlm_repro.engine.kernels.products import linear
from mlm_repro.engine.kernels.registry import kernel
from mlm_repro.engine.model.cache import by_head
from mlm_repro.engine.model.microbatch import PipelineInput, SentencePairs
from mlm_repro.engine.model.stage_model import StageModel
from mlm_repro.engine.model.transformer import (
    MLP,
    Embedding,
    SelfAttention,
    TransformerLayer,
    drop,
    drop_weights,
    embedding_table,
    recomputed,
    run_layers,
)
from mlm_repro.engine.parallel.collectives import enter_tensor_parallel
from mlm_repro.engine.parallel.mesh import ParallelMesh
from mlm_repro.engine.parallel.sharding import Role, Roles
from mlm_repro.engine.rng import Dropout


class BidirectionalAttention(SelfAttention):
    """Attention from every position to every token that is not padding, [s, b, h] → [s, b, h], with
    heads divided over the tensor-parallel axis, each rank of which calls it. A call takes the
    input, the Dropout or None for none, and `is_token` [b, s], which is False at padding. Under
    sequence parallelism input and output are this rank's positions, [s/t, b, h]. The output is
    without the last product's bias."""

    def forward(self, x: Tensor, dropout: Dropout | None, is_token: Tensor) -> Tensor:  # type: ignore[override]
        qkv = self.query_key_value(x).unflatten(
            2, (self.heads, 3, self.head_dim)
        )  # [s, b, n/t, 3, d]
        query, key, value = by_head(qkv)
        context = recomputed(self.recompute, self._attend, query, key, value, is_token, dropout)
        return self.dense(context.permute(2, 0, 1, 3).flatten(2), add_bias=False)  # [s, b, h]

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_token: Tensor,
        dropout: Dropout | None,
    ) -> Tensor:
        allowed = is_token[:, None, None, :]  # [b, 1, 1, s]
        if dropout is None:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        scores = torch.matmul(query * self.head_dim**-0.5, key.transpose(-1, -2))  # [b, n/t, s, s]
        weights: Tensor = kernel("masked_softmax", scores)(scores, 1.0, allowed)
        return torch.matmul(drop_weights(weights, self.layer, dropout, self.axis), value)


class ExactMLP(MLP):
    """MLP of a layer, [s, b, h] → [s, b, h] by way of 4h columns, with exact GeLU and the 4h
    columns divided over the tensor-parallel axis, each rank of which calls it. Under sequence
    parallelism input and output are this rank's positions, [s/t, b, h]. The output is without the
    last product's bias."""

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)), add_bias=False)


class BertLayer(TransformerLayer):
    """BERT's layer, [s, b, h] → [s, b, h]: attention and MLP, each after a norm. A call takes the
    states, the Dropout or None for none, and `is_token` [b, s], which is False at padding. Under
    sequence parallelism input and output are this rank's positions, [s/t, b, h]. The residual is
    taken before the norm, or after it if `bert.layer_norm_order` is `original`. Every
    tensor-parallel rank calls it."""

    attention_class = BidirectionalAttention
    mlp_class = ExactMLP

    def __init__(
        self, config: ModelConfig, mesh: ParallelMesh, layer: int, recompute_attention: bool = False
    ) -> None:
        super().__init__(config, mesh, layer, recompute_attention)
        self.is_original = config.bert.layer_norm_order == "original"
        self.input_layernorm.eps = self.post_attention_layernorm.eps = (
            config.bert.layer_norm_epsilon
        )

    def forward(self, x: Tensor, dropout: Dropout | None, is_token: Tensor) -> Tensor:  # type: ignore[override]
        normed = self.input_layernorm(x)
        attention = self.self_attention(normed, dropout, is_token)
        x = self.add(normed if self.is_original else x, attention, "attention", dropout)
        normed = self.post_attention_layernorm(x)
        return self.add(normed if self.is_original else x, self.mlp(normed), "mlp", dropout)


class BertEmbedding(Embedding):
    """Sum of word, position and segment embeddings, then dropout: token ids and segments (0 or 1),
    each [b, s], → [s, b, h], or this rank's part of the sequence under sequence parallelism. A last
    stage that is not also the first holds the word embedding alone, for the output head."""

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, is_first: bool) -> None:
        super().__init__(config, mesh, is_first)
        if is_first:
            self.token_type_embeddings = embedding_table(2, config.hidden_size)

    def forward(self, tokens: Tensor, dropout: Dropout | None, token_types: Tensor) -> Tensor:  # type: ignore[override]
        embedded = self.embedded(tokens)
        s = embedded.size(0)
        types = self.token_type_embeddings(token_types.T.narrow(0, self.mesh.sequence_rank * s, s))
        return drop(embedded + types, "embedding", dropout, self.mesh)


class MaskedHead(nn.Module):
    """Prediction of masked tokens by a BERT's last stage. A call takes the stage's output, the word
    embedding and a mask of positions [s, b], and returns this rank's logits [m, v/t] at the m
    masked positions alone: dense layer, GeLU and layer norm of the output, then the product with
    the word embedding, plus a bias. The word embedding and the bias are divided over the
    tensor-parallel axis, the rest is whole on each rank. The bias is not initialized here."""

    shard_dims: ClassVar[dict[str, int]] = {"bias": 0}
    roles: ClassVar[Roles] = {"bias": Role.BIAS}

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.layernorm = nn.LayerNorm(config.hidden_size, config.bert.layer_norm_epsilon)
        self.bias = nn.Parameter(torch.empty(config.padded_vocab_size // mesh.tp.size))

    def forward(self, hidden: Tensor, words: Tensor, where: Tensor) -> Tensor:
        """Return this rank's logits [m, v/t] at the m positions where the mask `where` [s, b] is
        True, in the order of its elements: dense layer, GeLU and layer norm of the states, then the
        product with the word embedding, plus the bias. `hidden` are the last stage's output states
        [s, b, h], or this rank's part of the sequence [s/t, b, h] under sequence parallelism, and
        `words` is this rank's part of the word embedding, [v/t, h]. Every tensor-parallel rank
        calls it."""
        states = self.layernorm(F.gelu(self.dense(hidden)))
        states = enter_tensor_parallel(states, self.mesh.tp, self.mesh.sequence_parallel)
        return linear(states[where], words, self.bias)


class BERT(StageModel):
    """Masked language model over sentence pairs, or one pipeline stage of it. A stage turns token
    ids [b, s], or the previous stage's states, into states [s, b, h]; the last stage also gives, by
    `batch_loss`, the loss of masked tokens and, in training, of sentence order. A model that is not
    divided into stages gives, by `logits`, the scores of words for one sequence."""

    def build(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        if self.stage.is_first or self.stage.is_last:
            self.embedding = BertEmbedding(config, mesh, self.stage.is_first)
        self.layers = self.layers_of(BertLayer)
        if self.stage.is_last:
            self.final_layernorm = nn.LayerNorm(config.hidden_size, config.bert.layer_norm_epsilon)
            self.masked_head = MaskedHead(config, mesh)
            self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
            self.order_head = nn.Linear(config.hidden_size, 2)

    def run_stage(self, inputs: Tensor, batch: PipelineInput) -> Tensor:
        pairs = _pairs_of(batch)
        x = (
            self.embedding(inputs, batch.dropout, pairs.token_types)
            if self.stage.is_first
            else inputs
        )
        layers = list(self.layers.values())
        x = run_layers(layers, x, batch.dropout, pairs.is_token, at_once=self.recomputed_layers)
        return self.final_layernorm(x) if self.stage.is_last else x

    def pooled(self, hidden: Tensor) -> Tensor:
        """Return the summary of each sentence pair, [b, h]: tanh of a linear layer's output for the
        first position of the last stage's states [s, b, h]. Under sequence parallelism the states
        are this rank's part of the sequence, [s/t, b, h]: only the first tensor-parallel rank has
        that position, and the result of any other rank is meaningless."""
        return torch.tanh(self.pooler(hidden[0]))

    def logits(self, tokens: Tensor) -> Tensor:
        """Return this rank's logits [s, v/t] at every position of one sequence of token ids [1, s],
        which has no padding and counts as one segment. No dropout is applied. The model must not be
        divided into pipeline stages. Every tensor-parallel rank calls it."""
        hidden = self.run_stage(tokens, PipelineInput(tokens, tokens, None))
        return self.masked_head(
            hidden, self.embedding.word_embeddings.weight, torch.ones_like(tokens.T).bool()
        )

    def masked_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy [b, s], in fp32 (fp64 stays fp64), at each masked position, 0
        where the target is negative, from targets [b, s] and the last stage's states [s, b, h], or
        [s/t, b, h] under sequence parallelism. Collective over the tp axis; the result is whole on
        every rank."""
        where = targets.T >= 0  # [s, b]
        logits = self.masked_head(hidden, self.embedding.word_embeddings.weight, where)  # [m, v/t]
        masked_losses = vocab_parallel_cross_entropy(
            logits, targets.T[where], self.config.vocab_size, self.mesh.tp
        )
        losses = masked_losses.new_zeros(where.shape)
        losses[where] = masked_losses
        return losses.T

    def batch_loss(self, hidden: Tensor, batch: PipelineInput) -> Tensor:
        """Return the scalar loss of a microbatch from the last stage's states. In training it is
        the sum of the cross-entropies of masked positions, divided by their number in the
        microbatch or by `batch.mean_targets` (`train.normalise`), plus the loss of sentence order.

        In evaluation mode it leaves sentence order out, and averages over the masked positions of
        each sequence, then over sequences. So the exponential is the masked-LM perplexity and does
        not depend on batches. Collective over the tp axis.
        """
        pairs = _pairs_of(batch)
        losses = self.masked_losses(hidden, batch.targets)
        masked = batch.targets >= 0
        if not self.training:
            return (losses.sum(dim=1) / masked.sum(dim=1).clamp(min=1)).mean()
        work = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        order = F.cross_entropy(self.order_head(self.pooled(hidden)).to(work), pairs.is_swapped)
        if self.mesh.sequence_parallel:  # the first position lies on the first rank of the tp axis
            order = order * (self.mesh.tp.rank == 0)
            whole = self.mesh.tp.all_reduce(order.detach().clone())
            order = order + (whole - order.detach())
        count = masked.sum() if batch.mean_targets is None else batch.mean_targets
        return losses.sum() / count.clamp(min=1) + order


def _pairs_of(batch: PipelineInput) -> SentencePairs:
    """Return the SentencePairs of a batch: token types, padding and order. A batch without pairs
    counts as one segment per sequence, without padding and not swapped."""
    zeros = torch.zeros_like(batch.tokens)
    return batch.pairs or SentencePairs(zeros, zeros == 0, zeros[:, 0])
