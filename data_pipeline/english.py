"""What kind of English a dataset is, for its data card."""

import statistics
from collections.abc import Iterable
from itertools import groupby
from pathlib import PurePosixPath

from data_pipeline.document import Document
from data_pipeline.reading.prose import measure
from data_pipeline.stages.prose import Prose
from lineage.data_files import English

SAMPLE_DOCUMENTS = 1000


def kind_of(identifier: str) -> str:
    """Ending or name of the file that a document was, or the name of the corpus that it is a line of."""
    owner, _, place = identifier.partition(":")
    path = PurePosixPath(place.partition(":")[0].removesuffix(".gz"))
    return owner.partition("/")[0] if not place or place.isdigit() else path.suffix or path.name


def describe_english(documents: Iterable[Document]) -> list[English]:
    """The documents by kind, the kind with the most words first."""
    by_kind = groupby(sorted(documents, key=lambda each: kind_of(each.id)), lambda each: kind_of(each.id))
    kinds = [(kind, [each.text for each in group]) for kind, group in by_kind]
    found = [(kind, texts, [measure(text) for text in texts]) for kind, texts in kinds]
    words = {kind: sum(each.words for each in made_of) for kind, _, made_of in found}
    prose = Prose()
    rows = [
        English(
            kind=kind,
            documents=len(texts),
            words=words[kind] / max(1, sum(words.values())),
            prose=sum(len("\n\n".join(prose.prose_of(text))) for text in texts) / max(1, sum(map(len, texts))),
            function_words=sum(each.function_words for each in made_of) / max(1, words[kind]),
            sentence_words=words[kind] / max(1, sum(each.sentences for each in made_of)),
            median_words=statistics.median(each.words for each in made_of),
        )
        for kind, texts, made_of in found
    ]
    return sorted(rows, key=lambda row: (-row.words, row.kind))
