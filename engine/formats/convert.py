"""Import and export of checkpoints. Eight windows of tokens prove that both sides are the same model.

An export has a model card.
"""

from pathlib import Path
from typing import Literal

from engine.checkpoint.checkpoint import LoadedCheckpoint, load_for_inference
from engine.compare.models import (
    Agreement,
    ComparedModel,
    build_model,
    compare_models,
    engine_model,
    random_windows,
    transformers_model,
)
from engine.formats import Imported, check_output, new_output, read_ours, write_checkpoint
from engine.formats.huggingface import CONFIG, INDEX, WEIGHTS, read_huggingface, write_huggingface
from engine.formats.megatron import read_megatron
from engine.formats.torch_dist import METADATA, TRACKER, write_torch_dist
from engine.formats.vocabulary import VOCABULARY
from engine.model.gpt2 import GPT2
from lineage.atomic import write_text
from lineage.errors import BadInput, IntegrityFailure
from lineage.files import read_object, write_document

COMPARED = "compared.json"
"""Result of the comparison, beside an exported model. An import records it in origin.json."""
CARD = "README.md"


def export_checkpoint(
    checkpoint: Path, out: Path, format_: Literal["huggingface", "torch-dist"] = "huggingface"
) -> Path:
    """Write the weights of a checkpoint, or of a run's newest, as the new directory `out`, and return `out`.

    transformers reads the export back if it is installed, otherwise this engine, and must compute the same. An export
    without GPT-2's vocabulary is not read back. Raises BadInput if the model is not a GPT-2 or `out` cannot be written,
    IntegrityFailure if the checkpoint is incomplete or changed or the export is another model. Nothing is left there
    then.
    """
    check_output(out)
    loaded = load_for_inference(checkpoint, as_stored=True)
    if not isinstance(loaded.model, GPT2):
        raise BadInput(f"{loaded.directory} is a {loaded.config.family}; only GPT-2 is written in other formats")
    write = write_huggingface if format_ == "huggingface" else write_torch_dist
    with new_output(out) as temporary:
        write(loaded, temporary)
        write_card(temporary, loaded)
        if written := _read_back(loaded, temporary):
            write_document(temporary / COMPARED, _agreement(engine_model(loaded.model.float()), written, out))
    return out


def import_checkpoint(directory: Path, out: Path, vocab: Path | None = None, heads: int | None = None) -> Path:
    """Write the weights that `read_published` reads as the sealed checkpoint `out`, and return `out`.

    transformers, if it is installed, reads a Hugging Face directory too and must compute the same.
    """
    check_output(out)
    imported = read_published(directory, vocab, heads)
    if is_huggingface(directory) and (theirs := transformers_model(directory, imported.model)):
        agreement = _agreement(build_model(imported.model, imported.tensors), theirs, directory)
        imported.origin["compared"] = agreement.model_dump(mode="json")
    write_checkpoint(out, imported)
    return out


def read_published(directory: Path, vocab: Path | None = None, heads: int | None = None) -> Imported:
    """Weights of a Hugging Face GPT-2 directory, a Megatron-LM save directory or a distributed checkpoint.

    Raises BadInput for any other directory, and what the formats raise.
    """
    if not directory.is_dir():
        raise BadInput(f"there is no directory {directory}")
    if vocab is not None and not vocab.is_dir():
        raise BadInput(f"there is no vocabulary directory {vocab}")
    if any((directory / name).is_file() for name in (TRACKER, METADATA)):
        return read_megatron(directory, vocab, heads)
    if is_huggingface(directory):
        return read_huggingface(directory, vocab, heads)
    raise BadInput(
        f"{directory} is neither a Megatron-LM save directory ({TRACKER}), nor a distributed checkpoint "
        f"({METADATA}), nor a Hugging Face directory ({CONFIG} with {WEIGHTS})"
    )


def is_huggingface(directory: Path) -> bool:
    """True if a directory has the files of a Hugging Face model."""
    return (directory / CONFIG).is_file() and any((directory / name).is_file() for name in (WEIGHTS, INDEX))


def _read_back(loaded: LoadedCheckpoint, directory: Path) -> ComparedModel | None:
    if is_huggingface(directory) and (theirs := transformers_model(directory, loaded.config)):
        return theirs
    if not is_huggingface(directory) and not (directory / VOCABULARY).is_file():
        return None
    imported = read_published(directory)
    return build_model(imported.model, imported.tensors)


def _agreement(ours: ComparedModel, theirs: ComparedModel, where: Path) -> Agreement:
    agreement = compare_models(ours, theirs, random_windows(ours.config))
    if not agreement.is_one_model:
        raise IntegrityFailure(
            f"{where} is a different model according to {theirs.program}: {agreement.weight or agreement.tensor}"
        )
    return agreement


def write_card(directory: Path, loaded: LoadedCheckpoint) -> None:
    """Write the model card: a header for the Hugging Face hub, and the checkpoint's digest."""
    from huggingface_hub import ModelCardData

    config = loaded.directory / "config.json"
    name, twin = read_ours(read_object(config), "gpt2", config)
    header = ModelCardData(
        model_name=name, library_name="transformers", pipeline_tag="text-generation", tags=["gpt2", "megatron-lm"]
    )
    scaled = "It is a shrunk twin of a published model: its numbers are scaled ones.\n" if twin else ""
    text = f"GPT-2, trained as Megatron-LM trains it. SHA-256 of the checkpoint: {loaded.digest}.\n{scaled}"
    write_text(directory / CARD, f"---\n{header}\n---\n\n# {name}\n\n{text}")
