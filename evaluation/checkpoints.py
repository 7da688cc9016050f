"""Any checkpoint that can be named, as one of this suite's: ours, Hugging Face's GPT-2, Megatron-LM's, `torch_dist`."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data_pipeline.contamination.testsets import find_gpt2_vocabulary
from engine.checkpoint.checkpoint import FOLDER
from engine.checkpoint.shards import INDEX
from engine.formats import write_checkpoint
from engine.formats.convert import read_published
from engine.formats.torch_dist import METADATA, TRACKER
from engine.formats.vocabulary import VOCABULARY
from evaluation.hub_models import cached_model
from lineage.digest import is_sealed
from lineage.errors import BadInput, DataMissing


@contextmanager
def native_checkpoint(path: Path, vocab: Path | None = None, heads: int | None = None) -> Iterator[Path]:
    """A checkpoint or run directory of this suite's own: `path` itself, or what is imported from it meanwhile.

    What is not there but has the form `owner/name` is asked of the Hugging Face hub. Megatron-LM checkpoints have no
    vocabulary: it is `vocab`, or what lies beside them, or the published one. Raises BadInput for what is no
    checkpoint, and what imports raise.
    """
    directory = path if path.exists() else _download(path)
    if not directory.is_dir() or _is_native(directory):
        yield directory
        return
    names = {file.name for file in directory.iterdir()}
    if vocab is None and names & {TRACKER, METADATA} and VOCABULARY not in names:
        with suppress(DataMissing):
            vocab = find_gpt2_vocabulary()[0].parent
    with tempfile.TemporaryDirectory(prefix="mlm-eval-") as temporary:
        write_checkpoint(imported := Path(temporary) / "imported", read_published(directory, vocab, heads))
        yield imported


def _is_native(directory: Path) -> bool:
    return (
        directory.resolve().name == FOLDER
        or (directory / FOLDER).is_dir()
        or is_sealed(directory)
        or (directory / INDEX).is_file()
    )


def _download(path: Path) -> Path:
    try:
        return cached_model(str(path))
    except (BadInput, DataMissing) as error:
        raise BadInput(f"there is no checkpoint directory {path}: {error}") from error
