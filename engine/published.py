"""Files by which directories of other programs are recognised. Imports no torch."""

from pathlib import Path

from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.lock import check_is_there

TRACKER = "latest_checkpointed_iteration.txt"
"""Name of the file in a Megatron-LM save directory that states the newest iteration."""
METADATA = ".metadata"
"""Name of the file of metadata in a distributed checkpoint of torch."""
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
"""Names of the configuration, of the weights and of their index in a Hugging Face directory."""
BIN = "pytorch_model.bin"
PLAN = "plan.json"
"""Name of the file that describes a model divided by `shard-hf`."""


def is_megatron(directory: Path) -> bool:
    """Return True if a directory has a file that marks a Megatron-LM save,
    `latest_checkpointed_iteration.txt`, or a distributed checkpoint of torch, `.metadata`."""
    return any((directory / name).is_file() for name in (TRACKER, METADATA))


def is_huggingface(directory: Path) -> bool:
    """Return True if a directory has a Hugging Face model's config.json and its safetensors, by the
    name of one file or of their index."""
    return (directory / CONFIG).is_file() and any(
        (directory / name).is_file() for name in (WEIGHTS, INDEX)
    )


def check_published(directory: Path) -> None:
    """Raise BadInput unless `directory` exists and has, by the names of its files, weights that can
    be imported: a Megatron-LM save, a distributed checkpoint, or a Hugging Face model in
    safetensors."""
    check_is_there(directory, "directory")
    if is_megatron(directory) or is_huggingface(directory):
        return
    raise BadInput(
        f"{directory / BIN} is pickled, which is not read here: transformers' save_pretrained"
        " writes safetensors, and mlm-eval --set backend=transformers scores it"
        if (directory / BIN).is_file()
        else (
            f"{directory} is neither a Megatron-LM save directory ({TRACKER}), nor a distributed"
            f" checkpoint ({METADATA}), nor a Hugging Face directory ({CONFIG} with {WEIGHTS})"
        )
    )
