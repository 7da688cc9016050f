"""What a BERT's vocabulary has besides text, and how much of a text it is asked for."""

SPECIAL_TOKENS = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")
"""They have the ids that follow the tokenizer's, in this order."""
MASKED_SHARE = 0.15
"""Of the tokens of a sequence."""
