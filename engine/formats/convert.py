"""Import and export of checkpoints, and the proof that both sides are the same model.

An export is read back, and every weight compared bit by bit. Where transformers is installed, it
computes the losses of eight windows of tokens beside this engine, in fp32. `mlm-verify against`
compares every tensor of a training step. Shapes: s sequence, v vocabulary.
"""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mlm_repro.engine.config import ModelConfig
from mlm_repro.engine.formats import Imported, write_checkpoint
from mlm_repro.engine.formats.huggingface import (
    OVER_VOCABULARY,
    read_huggingface,
    read_ours,
    write_huggingface,
)
from mlm_repro.engine.formats.megatron import read_megatron
from mlm_repro.engine.inference import LoadedCheckpoint, load_for_inference
from mlm_repro.engine.model.gpt2 import GPT2
from mlm_repro.engine.model.stage_model import StageModel
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.published import check_published, is_huggingface, is_megatron
from mlm_repro.lineage.atomic import JSON, write_text
from mlm_repro.lineage.chain import read_newest
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.extras import import_extra
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
"""Family → the hub's name for the task of such a model, and the model's name."""
SCALED = "It is a shrunk twin of a published model: its numbers are scaled ones.\n"
WINDOWS, LENGTH = 8, 64
"""Number of windows of random tokens, and tokens per window."""
TOLERANCE = 1e-4
"""Nats by which mean losses of one model may differ. Rounding takes them a hundredth of that
apart."""


def export_checkpoint(checkpoint: Path, out: Path) -> Path:
    """Write a checkpoint, or a run's newest, as the new Hugging Face directory `out` with a card,
    and return `out`.

    Raises BadInput if transformers has no such model or `out` cannot be written, IntegrityFailure
    if the checkpoint is incomplete or changed or the export reads back as another model. A failure
    leaves no part of `out`.
    """
    with new_output(out) as temporary:
        read_newest(checkpoint, lambda chosen: _export(chosen, temporary))
    return out


def _export(checkpoint: Path, temporary: Path) -> None:
    loaded = load_for_inference(checkpoint, as_stored=True)
    write_huggingface(loaded, temporary)
    write_card(temporary, loaded)
    model: Any = loaded.model.float()
    check_weights(model, read_huggingface(temporary), checkpoint)
    compare_losses(model, temporary, checkpoint)


def import_checkpoint(
    directory: Path, out: Path, vocab: Path | None = None, heads: int | None = None
) -> Path:
    """Write the weights that `read_published` reads as the sealed checkpoint `out`, and return
    `out`.

    For a Hugging Face GPT-2, transformers must compute the same losses if it is installed.
    """
    check_output(out)
    imported = read_published(directory, vocab, heads)
    if is_huggingface(directory) and imported.model.family == "gpt2":
        model = GPT2(imported.model, serial_mesh()).eval()
        model.load_state_dict(imported.tensors)
        if compared := compare_losses(model, directory, directory):
            imported.origin["compared"] = compared
    write_checkpoint(out, imported)
    return out


def read_published(
    directory: Path, vocab: Path | None = None, heads: int | None = None
) -> Imported:
    """Read the weights of a Hugging Face GPT-2 or BERT, a Megatron-LM save directory or a
    distributed checkpoint.

    Raises BadInput for any other directory, and whatever the format's reader raises.
    """
    check_published(directory)
    if vocab is not None and not vocab.is_dir():
        raise BadInput(f"there is no vocabulary directory {vocab}")
    read = read_megatron if is_megatron(directory) else read_huggingface
    return read(directory, vocab, heads)


def write_card(directory: Path, loaded: LoadedCheckpoint) -> None:
    """Write the model card: the fields that the hub reads, and the checkpoint's digest."""
    config = loaded.directory / "config.json"
    family = loaded.config.family
    name, twin = read_ours(read_object(config), family, config)
    task, title = TITLES[family]
    card = CARD.format(task=task, family=family, name=name, title=title, digest=loaded.digest)
    write_text(directory / "README.md", card + SCALED * (twin is not None))


def check_weights(model: StageModel, written: Imported, where: Path) -> None:
    """Compare a model with its export. Raises IntegrityFailure naming the first weight, in the
    order of the forward pass, with other values."""
    for name, parameter in model.named_parameters():
        ours = parameter.detach()
        theirs = written.tensors[name]
        if name in OVER_VOCABULARY:  # rows beyond the vocabulary are not written
            ours = ours[: model.config.vocab_size]
            theirs = theirs[: model.config.vocab_size]
        if not torch.equal(ours, theirs):
            largest = (ours - theirs).abs().max()
            raise IntegrityFailure(
                f"{where} is written as another model: {name} differs by at most {largest:.1e}"
            )


def compare_losses(model: Any, directory: Path, where: Path) -> JSON | None:
    """Compare a model's losses with those that transformers computes from a directory.

    Returns the programs and the largest difference, or None if transformers is not installed.
    Raises IntegrityFailure if transformers cannot read the directory, or if losses differ by more
    than TOLERANCE.
    """
    try:
        library = import_extra("transformers", "bench")
    except BadInput:
        return None
    program = f"transformers {version('transformers')}"
    library.utils.logging.disable_progress_bar()
    try:
        kind = library.GPT2LMHeadModel if isinstance(model, GPT2) else library.BertForPreTraining
        theirs = kind.from_pretrained(directory, use_safetensors=True).float().eval()
    except Exception as error:  # the library raises errors of many kinds
        message = str(error).partition("\n")[0]
        raise IntegrityFailure(f"{directory} cannot be read by {program}: {message}") from error
    if isinstance(model, GPT2):
        ours = window_losses(model.config, lambda tokens: model.logits(model(tokens)).squeeze(1))
        others = window_losses(
            model.config, lambda tokens: theirs(input_ids=tokens, use_cache=False).logits[0]
        )
    else:
        ours = window_losses(model.config, model.logits)
        others = window_losses(
            model.config, lambda tokens: theirs(input_ids=tokens).prediction_logits[0]
        )
    largest = float(np.abs(np.subtract(ours, others)).max())
    if not largest <= TOLERANCE:
        by = f"a loss differs by {largest:.1e}, tolerance {TOLERANCE:.1e}"
        raise IntegrityFailure(f"{where} is a different model according to {program}: {by}")
    return {"programs": ["this engine", program], "largest": largest}


@torch.inference_mode()
def window_losses(config: ModelConfig, logits_of: Callable[[Tensor], Tensor]) -> list[float]:
    """Return the mean cross-entropy of each window of random tokens, from a model's logits [s, v]
    of token ids [1, s]."""
    size = (WINDOWS, min(config.seq_length, LENGTH) + 1)
    windows = torch.from_numpy(np.random.RandomState(0).randint(config.vocab_size, size=size))
    pairs = (
        (logits_of(tokens[None, :-1])[:, : config.vocab_size], tokens[1:]) for tokens in windows
    )
    return [F.cross_entropy(logits.float(), targets).item() for logits, targets in pairs]
