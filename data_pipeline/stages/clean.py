"""Repair of broken Unicode (the paper's ftfy step)."""

from typing import Literal

from data_pipeline.document import Drop
from data_pipeline.stages.stage import SOURCE, Example, TextFilter


class Clean(TextFilter):
    """Repair broken Unicode with ftfy. A document that becomes empty is dropped."""

    name = verb = "clean"
    after = SOURCE
    examples = (
        Example("as it was", "as it was"),
        Example("âœ” No problem, schÃ¶n", "✔ No problem, schön"),
        Example("\ufb01ne e\u0301", "fine é"),
        Example(" \n\t ", Drop("empty")),
        Example("", Drop("empty")),
    )

    normalization: Literal["NFC", "NFKC"] = "NFC"
    """Unicode normal form of the repaired text."""

    def apply(self, text: str) -> str | Drop:
        """The repaired text."""
        from data_pipeline.fast.exact_ftfy import fix_text

        fixed = fix_text(self.normalization)(text)
        return fixed if fixed.strip() else Drop("empty")
