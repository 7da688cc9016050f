"""The stage `clean`: repair of broken Unicode with ftfy, as in the paper."""

from collections.abc import Callable
from functools import cached_property
from typing import Literal

from mlm_repro.data_pipeline.document import Drop
from mlm_repro.data_pipeline.stages.stage import Example, TextFilter


class Clean(TextFilter):
    """Repair broken Unicode with ftfy. A document that then has at most white space is dropped."""

    name = verb = "clean"
    examples = (
        Example("âœ” No problem, schÃ¶n", "✔ No problem, schön"),
        Example("\ufb01ne e\u0301", "fine é"),
        Example("", Drop("empty")),
    )

    normalization: Literal["NFC", "NFKC"] = "NFC"
    """Unicode normal form of the repaired text."""

    unescape_html: bool = True
    """Replace HTML entities in lines before the first `<`."""
    fix_character_width: bool = True
    """Replace full-width letters and signs, such as Chinese and Japanese punctuation, by signs of
    ordinary width."""
    uncurl_quotes: bool = True
    """Replace curly quotes by straight ones."""

    @cached_property
    def _fix_text(self) -> Callable[[str], str]:
        from mlm_repro.data_pipeline.fast.exact_ftfy import fix_text

        switches = ("unescape_html", "fix_character_width", "uncurl_quotes")
        return fix_text(self.normalization, *(name for name in switches if not getattr(self, name)))

    def apply(self, text: str) -> str | Drop:
        """Return the text as ftfy repairs it by the settings, or a Drop if it then has only white
        space. Raises Unfit for a text that cannot be repaired in linear time."""
        fixed = self._fix_text(text)
        return fixed if fixed.strip() else Drop("empty")
