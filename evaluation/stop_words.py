"""NLTK's English stop words, those with an apostrophe left out, as in cybertronai/bflm's evaluation of GPT-2.

The GPT-2 paper reports LAMBADA with "a stop-word filter" (section 3.3) and names neither list nor rule; bflm's
`eval_lambada_slow.py` is the reconstruction others refer to. It rejects one at every sub-word it generates; here
only the first sub-word of the answer may not be one, since later ones ("an", "her") are parts of words.
"""

import numpy as np

from evaluation.protocol import Encoder, Tokens

_LIST = """
a about above after again against all am an and any are as at be because been before being below between both but by can
did do does doing don down during each few for from further had has have having he her here hers herself him himself his
how i if in into is it its itself just me more most my myself no nor not now of off on once only or other our ours
ourselves out over own s same she should so some such t than that the their theirs them themselves then there these they
this those through to too under until up very was we were what when where which while who whom why will with you your
yours yourself yourselves
"""
STOP_WORDS = frozenset(_LIST.split())


def stop_word_tokens(tokenizer: Encoder) -> Tokens:
    """Ids of the sub-words that are a whole stop word, in any case and with or without a space before it."""
    texts = (tokenizer.decode([token]) for token in range(tokenizer.vocab_size))
    banned = [token for token, text in enumerate(texts) if text.strip().lower() in STOP_WORDS]
    return np.asarray(banned, dtype=np.int64)
