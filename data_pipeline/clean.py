"""Repair of broken Unicode (the paper's ftfy step)."""

from typing import Literal

import ftfy

from data_pipeline.document import Document, Drop


def clean(document: Document, normalization: Literal["NFC", "NFKC"] = "NFC") -> Document | Drop:
    """The document with mojibake, entities, quotes and control characters repaired; dropped if nothing is left."""
    text = ftfy.fix_text(document.text, normalization=normalization)
    return Document(document.id, text) if text.strip() else Drop("empty")
