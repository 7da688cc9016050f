"""Length filter: the paper removes documents of fewer than 128 tokens."""

from pydantic import PositiveInt

from mlm_repro.data_pipeline.document import Drop
from mlm_repro.data_pipeline.stages.stage import Example, TokenFilter


class Length(TokenFilter):
    """Drop documents with too few tokens. A document is kept if it has at least `min_tokens`, its
    end-of-text token included."""

    name = verb = "length"
    examples = (
        Example("a text", "a text", tokens=128),
        Example("a text", Drop("fewer than 128 tokens"), tokens=127),
        Example("", Drop("fewer than 128 tokens"), tokens=1),
    )

    min_tokens: PositiveInt = 128
    """Smallest number of tokens of a kept document, its end-of-text token included."""

    def apply(self, text: str, tokens: int) -> Drop | None:
        """Return None if `tokens`, the number of the text's tokens with its end-of-text token, is
        at least the attribute `min_tokens`, so that the text is kept, else a Drop. The text itself
        is not read. Megatron-LM's cleanup_dataset.py counts only texts under 1,024 characters; here
        every document is counted."""
        return None if tokens >= self.min_tokens else Drop(f"fewer than {self.min_tokens} tokens")
