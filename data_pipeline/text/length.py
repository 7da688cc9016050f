"""Length filter: the paper removes documents of fewer than 128 tokens."""

from data_pipeline.document import Document, Drop


def keep_long(document: Document, tokens: int, min_tokens: int = 128) -> Document | Drop:
    """The document if it has at least `min_tokens`; `tokens` counts its end-of-text token, as Megatron-LM does.

    Megatron-LM's cleanup_dataset.py counts only texts under 1,024 characters; here every document is counted.
    """
    return document if tokens >= min_tokens else Drop(f"fewer than {min_tokens} tokens")
