"""Which published format a directory is in, from its files."""

from pathlib import Path

from engine.formats import check_output, write_checkpoint
from engine.formats.huggingface import CONFIG, INDEX, WEIGHTS, read_huggingface
from engine.formats.megatron import read_megatron
from engine.formats.torch_dist import METADATA, TRACKER
from lineage.errors import BadInput


def import_checkpoint(directory: Path, out: Path, vocab: Path | None = None, heads: int | None = None) -> Path:
    """Turn a Hugging Face GPT-2 directory or a Megatron-LM save directory into the sealed checkpoint `out`.

    Raises BadInput for a directory that is neither, and what the formats raise.
    """
    if not directory.is_dir():
        raise BadInput(f"there is no directory {directory}")
    if vocab is not None and not vocab.is_dir():
        raise BadInput(f"there is no vocabulary directory {vocab}")
    check_output(out)
    if any((directory / name).is_file() for name in (TRACKER, METADATA)):
        imported = read_megatron(directory, vocab, heads)
    elif (directory / CONFIG).is_file() and any((directory / name).is_file() for name in (WEIGHTS, INDEX)):
        imported = read_huggingface(directory, vocab, heads)
    else:
        raise BadInput(
            f"{directory} is neither a Megatron-LM save directory ({TRACKER}), nor a distributed checkpoint "
            f"({METADATA}), nor a Hugging Face directory ({CONFIG} with {WEIGHTS})"
        )
    write_checkpoint(out, imported)
    return out
