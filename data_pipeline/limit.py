"""The end of a source that is taken only in part."""

from data_pipeline.document import Document, size_bytes


class Limit:
    """Admits documents until one would exceed a number of documents or of UTF-8 bytes."""

    def __init__(self, max_documents: int | None, max_bytes: int | None) -> None:
        self._max_documents, self._max_bytes = max_documents, max_bytes
        self.documents = self.bytes = 0

    def admits(self, document: Document) -> bool:
        """Whether the document is within the limits, counting it if it is."""
        documents, total_bytes = self.documents + 1, self.bytes + size_bytes(document.text)
        if self._max_documents is not None and documents > self._max_documents:
            return False
        if self._max_bytes is not None and total_bytes > self._max_bytes:
            return False
        self.documents, self.bytes = documents, total_bytes
        return True
