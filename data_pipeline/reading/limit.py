"""The end of a source that is taken only in part."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from data_pipeline.document import Document, size_bytes
from data_pipeline.reading.pieces import Piece
from data_pipeline.reading.readers import Limits, read_pieces


class Limit:
    """Admits documents until one would exceed a number of documents or of UTF-8 bytes."""

    def __init__(self, max_documents: int | None, max_bytes: int | None) -> None:
        self._max_documents, self._max_bytes = max_documents, max_bytes
        self.documents = self.bytes = 0
        self.reached = False
        """Whether a document was refused."""

    def admits(self, document_bytes: int) -> bool:
        """Whether a document of that size is within the limits, counting it if it is."""
        documents, total_bytes = self.documents + 1, self.bytes + document_bytes
        over = self._max_documents is not None and documents > self._max_documents
        if over or (self._max_bytes is not None and total_bytes > self._max_bytes):
            self.reached = True
            return False
        self.documents, self.bytes = documents, total_bytes
        return True


def pieces_within(limit: Limit, pieces: Iterable[Piece], limits: Limits) -> Iterator[Piece]:
    """The pieces up to the first document that the limit does not admit; they are read once for their sizes."""
    for piece in pieces:
        take = 0
        for found in read_pieces([piece], limits):
            if isinstance(found, Document):
                if not limit.admits(size_bytes(found.text)):
                    if take:
                        yield replace(piece, take=take)
                    return
                take += 1
        yield piece
