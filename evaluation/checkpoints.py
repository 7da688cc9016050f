"""Any checkpoint that can be named, as one of this suite's: ours, Hugging Face's GPT-2, Megatron-LM's, `torch_dist`."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data_pipeline.contamination.testsets import find_gpt2_vocabulary
from data_pipeline.reading.hub import hub_is_reachable
from engine.checkpoint.checkpoint import FOLDER
from engine.checkpoint.shards import INDEX
from engine.formats import write_checkpoint
from engine.formats.convert import read_published
from engine.formats.torch_dist import METADATA, TRACKER
from engine.formats.vocabulary import VOCABULARY
from lineage.digest import is_sealed
from lineage.errors import BadInput, DataMissing

HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
HUB_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json", "vocab.json", "merges.txt"]


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
    if not HUB_NAME.fullmatch(str(path)) or not hub_is_reachable():
        raise BadInput(f"there is no checkpoint directory {path}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=HUB_FILES))
    except Exception as error:  # the hub's client raises errors of many libraries
        raise BadInput(f"there is no checkpoint directory {path}, nor could the hub give it: {error}") from error
