"""What the engine needs to know of a dataset directory. Imports no torch."""

import json
from dataclasses import dataclass
from pathlib import Path

from engine.config import ModelConfig
from lineage.digest import content_digest, is_sealed
from lineage.errors import BadInput, DataMissing, IntegrityFailure

DIARY = frozenset({"manifest.json", "ledger.json"})
"""Files that say when and how fast a dataset was made, not what it is."""


@dataclass(frozen=True)
class DatasetFacts:
    """A dataset made by `mlm-data run`."""

    directory: Path
    digest: str
    """Digest of its content: the same for a dataset built again from the same text."""
    vocab_size: int
    padded_vocab_size: int

    @classmethod
    def read(cls, directory: Path | None) -> "DatasetFacts":
        """Facts of a complete dataset; DataMissing if there is none, IntegrityFailure if it is not complete."""
        if directory is None:
            raise BadInput("data.dataset is not set: make a dataset with `mlm-data run` and name its directory")
        if not directory.is_dir():
            raise DataMissing(f"there is no dataset at {directory}; `mlm-data run` makes one")
        if not is_sealed(directory):
            raise IntegrityFailure(f"the dataset {directory} is not complete: run `mlm-data run` again")
        path = directory / "dataset.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            sizes = int(values["vocab_size"]), int(values["padded_vocab_size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise IntegrityFailure(f"{path} cannot be read: {error}") from error
        return cls(directory, content_digest(directory, without=DIARY), *sizes)

    def prefix(self, split: str) -> Path:
        """Path of a split's token file without its ending."""
        return self.directory / f"{split}_text_document"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's directory."""
        return self.directory / "tokenizer"

    def resize(self, model: ModelConfig) -> ModelConfig:
        """The model with this dataset's vocabulary."""
        return model.model_copy(update={"vocab_size": self.vocab_size, "padded_vocab_size": self.padded_vocab_size})
