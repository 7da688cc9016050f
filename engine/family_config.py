"""What a BERT and a Transformer-XL have besides what every model has. Imports no torch."""

from typing import Literal

from lineage.config import Config


class BertConfig(Config):
    """What a BERT has besides (2019 paper, Section 5.3)."""

    layer_norm_order: Literal["rearranged", "original"] = "rearranged"
    """`rearranged`: x + f(LN(x)), the 2019 paper's Figure 7 (b); `original`: LN(x + f(x)), its Figure 7 (a)."""
    layer_norm_epsilon: float = 1e-5
    """Added to the variance; the published BERT has 1e-12."""


class TransformerXLConfig(Config):
    """What a Transformer-XL has besides (Dai et al. 2019)."""

    memory_length: int = 0
    """States of earlier segments that every layer sees, `m`; 0 for a model without recurrence."""
    head_dim: int | None = None
    """Width of one attention head; hidden_size / num_heads unless given."""
    inner_size: int | None = None
    """Width between the two products of the MLP; 4 × hidden_size unless given."""
    cutoffs: tuple[int, ...] = ()
    """Adaptive embedding and softmax: first word of each cluster after the head, in order of falling frequency."""
    div_value: int = 1
    """Each cluster's embeddings are narrower than the last one's by this factor."""
