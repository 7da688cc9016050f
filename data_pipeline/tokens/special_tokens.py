"""BERT's special tokens and its share of masked tokens."""

SPECIAL_TOKENS = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")
"""Special tokens. A tokenizer without them gets them after its own entries, in this order."""
MASKED_SHARE = 0.15
"""Share of a sequence's tokens that are masked at most, but for rounding to whole tokens."""
