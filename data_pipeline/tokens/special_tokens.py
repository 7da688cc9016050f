"""Special tokens and the share of masked tokens of BERT."""

SPECIAL_TOKENS = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")
"""Special tokens, whose ids follow the tokenizer's in this order."""
MASKED_SHARE = 0.15
"""Share of a sequence's tokens that are masked."""
