"""Token counts of the stages that run before there is a tokenizer.

A trained tokenizer is made from what the language filter keeps, so the earlier stages set aside the texts that no
later stage sees; once the tokenizer exists they are counted, and the ledger is completed from the end backwards.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from data_pipeline.document import Document, Drop
from data_pipeline.document_file import DocumentFile
from data_pipeline.ledger import Stage


class EarlyStage:
    """A stage's dropped texts, and the changed ones before and after."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self.stage = stage
        self._dropped, self._before, self._after = (
            DocumentFile(folder / f"{stage.name}.{kind}") for kind in ("dropped", "before", "after")
        )

    def record(self, before: Document, after: Document | Drop) -> None:
        """Enter one outcome in the ledger, without its tokens."""
        self.stage.take(before)
        if isinstance(after, Drop):
            self.stage.drop(before, after)
            self._dropped.append(Document(after.reason, before.text))
            return
        self.stage.keep(after)
        if after.text != before.text:
            self.stage.changed += 1
            self._before.append(before)
            self._after.append(after)

    def complete(self, kept_tokens: int, count: Callable[[Iterable[str]], Iterator[int]]) -> int:
        """Enter all tokens, given those of the kept documents; returns the tokens the stage received."""
        incoming = self.stage.kept.tokens = kept_tokens
        for drop, tokens in zip(self._dropped.documents(), count(self._dropped.texts()), strict=True):
            self.stage.dropped[drop.id].tokens += tokens
            incoming += tokens
        incoming += sum(count(self._before.texts())) - sum(count(self._after.texts()))
        for file in (self._dropped, self._before, self._after):
            file.discard()
        self.stage.incoming.tokens = incoming
        return incoming
