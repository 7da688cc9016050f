"""The paper's corpora as the Hugging Face hub has them, streamed (Megatron-LM section 4.1: Wikipedia, OpenWebText,
RealNews, CC-Stories)."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from data_pipeline.document import Document, Malformed
from data_pipeline.file_sources import mend_surrogates
from data_pipeline.workers import Workers
from lineage.digest import sha256_json
from lineage.errors import DataMissing


@dataclass(frozen=True)
class Location:
    """A dataset on the hub."""

    repository: str
    subset: str | None
    revision: str | None


LOCATIONS = {
    "wikipedia": Location("wikimedia/wikipedia", "20231101.en", None),
    "openwebtext": Location("Skylion007/openwebtext", None, "refs/convert/parquet"),
}
WITHDRAWN = ("realnews", "cc-stories")


def refuse_withdrawn(names: Sequence[str]) -> None:
    """Raise DataMissing for corpora that nobody can download any more."""
    if gone := [name for name in names if name in WITHDRAWN]:
        raise DataMissing(
            f"{' and '.join(gone)} can no longer be downloaded from the original hosts: "
            f"get a copy from someone who has it and name it as jsonl:PATH in its place, or leave it out"
        )


class HubSource:
    """One corpus of the hub, read as a stream."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._location = LOCATIONS[name]

    def fingerprint(self) -> str:
        return sha256_json(asdict(self._location))

    def describe(self) -> str:
        place = self._location
        return f"{self.name} ({'/'.join(filter(None, (place.repository, place.subset)))} on the Hugging Face hub)"

    def read(self, workers: Workers) -> Iterator[Document | Malformed]:
        """Raises DataMissing if the hub stops answering."""
        from datasets import load_dataset

        place = self._location
        try:
            rows = load_dataset(place.repository, place.subset, revision=place.revision, split="train", streaming=True)
            for number, row in enumerate(rows, 1):
                text = row.get("text")
                if isinstance(text, str):
                    yield Document(f"{self.name}:{number}", mend_surrogates(text))
                else:
                    yield Malformed(self.name, number, "text is not a string", str(text)[:300])
        except GeneratorExit:
            raise
        except Exception as error:  # the hub's client raises errors of many libraries
            raise DataMissing(f"{self.name} could not be read from the Hugging Face hub: {error}") from error
