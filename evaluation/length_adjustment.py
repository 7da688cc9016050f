"""Perplexities of one text under tokenizations of different lengths, made comparable."""

import math

from lineage.errors import BadInput


def length_adjusted_perplexity(perplexity: float, num_tokens: float, num_words: float) -> float:
    """The perplexity per word of a model whose perplexity per token is given: exp(ln ppl · T_tokens / T_words).

    "Scaling Transformer-XL to 128 GPUs" turns 26.25 per BPE token into 42.5 per word with 1950 / 1699. Raises BadInput
    for a perplexity below 1 or counts that are not above 0.
    """
    if not (perplexity >= 1 and num_tokens > 0 and num_words > 0):
        raise BadInput(f"a perplexity of {perplexity} over {num_tokens} tokens and {num_words} words is impossible")
    return math.exp(math.log(perplexity) * num_tokens / num_words)
