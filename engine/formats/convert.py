"""Import and export of checkpoints, and the proof that what is written is the same model.

An export is read back, and every weight compared bit by bit. `mlm-verify against` compares every
tensor of a training step.
"""

from pathlib import Path

import torch

from mlm_repro.engine.formats import Imported, write_checkpoint
from mlm_repro.engine.formats.huggingface import (
    OVER_VOCABULARY,
    read_huggingface,
    read_ours,
    write_huggingface,
)
from mlm_repro.engine.formats.megatron import read_megatron
from mlm_repro.engine.inference import LoadedCheckpoint, load_for_inference
from mlm_repro.engine.model.stage_model import StageModel
from mlm_repro.engine.published import check_published, is_megatron
from mlm_repro.lineage.atomic import write_text
from mlm_repro.lineage.chain import read_newest
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.files import read_object
from mlm_repro.lineage.lock import check_output, new_output

CARD = """\
---
library_name: transformers
pipeline_tag: {task}
tags: [{family}, megatron-lm]
---

# {name}

{title}, trained as Megatron-LM trains it. SHA-256 of the checkpoint: {digest}.
"""
TITLES = {"gpt2": ("text-generation", "GPT-2"), "bert": ("fill-mask", "BERT")}
"""Family of a model → pair of texts (the hub's name for the task of such a model, the model's
name)."""
SCALED = "It is a shrunk twin of a published model: its numbers are scaled ones.\n"


def export_checkpoint(checkpoint: Path, out: Path) -> Path:
    """Write the model of a checkpoint, or of a run's newest checkpoint, in fp32 as the new Hugging
    Face directory `out` with a model card, read it back and compare every weight, and return the
    path `out`.

    Raises BadInput if `checkpoint` is no directory or a complete one of another kind, it has no
    tokenizer, transformers has no such model or `out` exists or cannot be written, IntegrityFailure
    if the directory is incomplete or changed or the export reads back as another model. A failure
    leaves no part of `out`.
    """
    with new_output(out) as temporary:
        read_newest(checkpoint, lambda chosen: _export(chosen, temporary))
    return out


def _export(checkpoint: Path, temporary: Path) -> None:
    loaded = load_for_inference(checkpoint, as_stored=True)
    write_huggingface(loaded, temporary)
    write_card(temporary, loaded)
    check_weights(loaded.model, read_huggingface(temporary), checkpoint)


def import_checkpoint(
    directory: Path, out: Path, vocab: Path | None = None, heads: int | None = None
) -> Path:
    """Write another program's weights, which `read_published` reads from `directory`, as the new
    sealed checkpoint `out` in fp32, and return the path `out`. `vocab`, a directory with a GPT-2's
    vocabulary, and `heads`, a number of attention heads, are handed to `read_published`. Raises
    BadInput if `out` exists, and BadInput or IntegrityFailure as `read_published` and
    `write_checkpoint` do."""
    check_output(out)
    write_checkpoint(out, read_published(directory, vocab, heads))
    return out


def read_published(
    directory: Path, vocab: Path | None = None, heads: int | None = None
) -> Imported:
    """Return the model in `directory`, a Hugging Face GPT-2's or BERT's directory, a Megatron-LM
    save directory or a distributed checkpoint, as an Imported.

    `vocab` is a directory with a GPT-2's vocabulary, which replaces the one in `directory`, where a
    Megatron-LM directory usually has none; a BERT does not use it. `heads` is the number of
    attention heads, needed for a Megatron-LM file that does not state it; any other model must have
    as many. Raises BadInput for any other directory or model and for a missing vocabulary or number
    of heads, and IntegrityFailure for damaged files.
    """
    check_published(directory)
    if vocab is not None and not vocab.is_dir():
        raise BadInput(
            f"there is no directory {vocab}, from which the vocabulary was to come: name one with a"
            " GPT-2's vocabulary by --vocab or --set vocab="
        )
    read = read_megatron if is_megatron(directory) else read_huggingface
    return read(directory, vocab, heads)


def write_card(directory: Path, loaded: LoadedCheckpoint) -> None:
    """Write README.md, a model card, into `directory`, to which `loaded`, a GPT-2 or BERT, was
    exported: the fields that the hub reads, the model's kind, its name in the config.json of
    `loaded.directory` (or else its family), `loaded.digest` and, for a twin, that its numbers are
    scaled. Raises IntegrityFailure if that config.json cannot be read, BadInput if it states an
    invalid twin."""
    config = loaded.directory / "config.json"
    family = loaded.config.family
    name, twin = read_ours(read_object(config), family, config)
    task, title = TITLES[family]
    card = CARD.format(task=task, family=family, name=name, title=title, digest=loaded.digest)
    write_text(directory / "README.md", card + SCALED * (twin is not None))


def check_weights(model: StageModel, written: Imported, where: Path) -> None:
    """Compare `model`, in fp32 and whole, with its export, read back as the Imported `written`,
    value by value; rows beyond the vocabulary are left out. `where`, the checkpoint's path, is
    named in the message. Raises IntegrityFailure naming the first weight, in the order of the
    forward pass, with other values."""
    for name, parameter in model.named_parameters():
        # Rows beyond the vocabulary are not written.
        rows = model.config.vocab_size if name in OVER_VOCABULARY else None
        ours = parameter.detach()[:rows]
        theirs = written.tensors[name][:rows]
        if not torch.equal(ours, theirs):
            largest = (ours - theirs).abs().max()
            raise IntegrityFailure(
                f"the export of {where} is not kept: read back, its {name} differs from the"
                f" checkpoint's by up to {largest:.1e}; check disk and memory, then export it again"
            )
