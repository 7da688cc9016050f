"""Import and export of checkpoints, and the proof that both sides are the same model.

Every weight is compared bit by bit, and the losses of eight windows of tokens, each computed by its own program in
fp32. `mlm-verify against` compares every tensor of a training step. Shapes: s sequence, v vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from mlm_repro.engine.compare.recorder import NameMap, read_names
from mlm_repro.engine.config import ModelConfig
from mlm_repro.engine.formats import Imported, write_checkpoint
from mlm_repro.engine.formats.huggingface import read_huggingface, read_ours, write_huggingface
from mlm_repro.engine.formats.megatron import read_megatron
from mlm_repro.engine.inference import LoadedCheckpoint, load_for_inference
from mlm_repro.engine.model.gpt2 import GPT2
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.published import check_published, is_huggingface, is_megatron
from mlm_repro.lineage.atomic import write_text
from mlm_repro.lineage.chain import read_newest
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.extras import import_extra
from mlm_repro.lineage.files import read_object
from mlm_repro.lineage.lock import check_output, new_output

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2, megatron-lm]
---

# {name}

GPT-2, trained as Megatron-LM trains it. SHA-256 of the checkpoint: {digest}.
"""
SCALED = "It is a shrunk twin of a published model: its numbers are scaled ones.\n"
WINDOWS, LENGTH = 8, 64
"""Windows of random tokens, and the tokens of one."""
TOLERANCE = 1e-4
"""Nats by which mean losses of one model may differ. Rounding takes them a hundredth of that apart."""


@dataclass(frozen=True)
class ComparedModel:
    """A GPT-2 and the program that computes it."""

    program: str
    module: nn.Module
    config: ModelConfig
    names: NameMap
    logits: Callable[[torch.Tensor], torch.Tensor]
    """Token ids [1, s] → logits [s, v]."""

    @torch.inference_mode()
    def losses(self) -> list[float]:
        """Mean cross-entropy of each window of random tokens, which depend on vocabulary and context alone."""
        size = (WINDOWS, min(self.config.seq_length, LENGTH) + 1)
        windows = torch.from_numpy(np.random.RandomState(0).randint(self.config.vocab_size, size=size))
        losses = []
        for tokens in windows:
            logits = self.logits(tokens[None, :-1])[:, : self.config.vocab_size]
            losses.append(F.cross_entropy(logits.float(), tokens[1:]).item())
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole tensors by our names, without padding rows of the vocabulary."""
        whole = {
            ours: self.names.in_our_order(ours, parameter.detach(), self.config.num_heads)
            for name, parameter in self.module.named_parameters()
            if (ours := self.names.ours(name, self.names.parameters, 0)) is not None
        }
        words = "embedding.word_embeddings.weight"
        return whole | {words: whole[words][: self.config.vocab_size]}


def export_checkpoint(checkpoint: Path, out: Path) -> Path:
    """Write a checkpoint, or a run's newest, as the new Hugging Face directory `out` with a card, and return `out`.

    transformers reads the export back if it is installed, otherwise this engine, and must compute the same. Raises
    BadInput if the model is not a GPT-2 or `out` cannot be written, IntegrityFailure if the checkpoint is incomplete or
    changed or the export is another model. Nothing is left there then.
    """
    with new_output(out) as temporary:
        read_newest(checkpoint, lambda chosen: _export(chosen, temporary))
    return out


def _export(checkpoint: Path, temporary: Path) -> None:
    loaded = load_for_inference(checkpoint, as_stored=True)
    if not isinstance(loaded.model, GPT2):
        raise BadInput(f"{loaded.directory} is a {loaded.config.family}; only GPT-2 is written in other formats")
    write_huggingface(loaded, temporary)
    write_card(temporary, loaded)
    written = transformers_model(temporary, loaded.config)
    if written is None:
        back = read_huggingface(temporary)
        written = build_model(back.model, back.tensors)
    check_same(engine_model(loaded.model.float()), written, checkpoint)


def import_checkpoint(directory: Path, out: Path, vocab: Path | None = None, heads: int | None = None) -> Path:
    """Write the weights that `read_published` reads as the sealed checkpoint `out`, and return `out`.

    transformers, if it is installed, reads a Hugging Face GPT-2 too and must compute the same.
    """
    check_output(out)
    imported = read_published(directory, vocab, heads)
    is_gpt2 = is_huggingface(directory) and imported.model.family == "gpt2"
    if is_gpt2 and (theirs := transformers_model(directory, imported.model)):
        imported.origin["compared"] = check_same(build_model(imported.model, imported.tensors), theirs, directory)
    write_checkpoint(out, imported)
    return out


def read_published(directory: Path, vocab: Path | None = None, heads: int | None = None) -> Imported:
    """Weights of a Hugging Face GPT-2 or BERT, a Megatron-LM save directory or a distributed checkpoint.

    Raises BadInput for any other directory, and what the formats raise.
    """
    check_published(directory)
    if vocab is not None and not vocab.is_dir():
        raise BadInput(f"there is no vocabulary directory {vocab}")
    read = read_megatron if is_megatron(directory) else read_huggingface
    return read(directory, vocab, heads)


def write_card(directory: Path, loaded: LoadedCheckpoint) -> None:
    """Write the model card: what the hub needs to show the model, and the checkpoint's digest."""
    config = loaded.directory / "config.json"
    name, twin = read_ours(read_object(config), "gpt2", config)
    write_text(directory / "README.md", CARD.format(name=name, digest=loaded.digest) + SCALED * (twin is not None))


def engine_model(model: GPT2) -> ComparedModel:
    """A whole model of this engine, in fp32."""
    return ComparedModel("this engine", model, model.config, read_names("ours"),
                         lambda tokens: model.logits(model(tokens)).squeeze(1))  # fmt: skip


def build_model(config: ModelConfig, tensors: dict[str, torch.Tensor]) -> ComparedModel:
    """This engine's model, built from whole tensors by our names."""
    model = GPT2(config, serial_mesh()).eval()
    model.load_state_dict(tensors)
    return engine_model(model)


def transformers_model(directory: Path, config: ModelConfig) -> ComparedModel | None:
    """transformers' model of a Hugging Face GPT-2 directory; None if the library is not installed.

    Raises IntegrityFailure if transformers cannot read the directory.
    """
    try:
        library = import_extra("transformers", "bench")
    except BadInput:
        return None
    program = f"transformers {version('transformers')}"
    library.utils.logging.disable_progress_bar()
    try:
        model = library.GPT2LMHeadModel.from_pretrained(directory, use_safetensors=True).float().eval()
    except Exception as error:  # the library raises errors of many kinds
        message = str(error).partition("\n")[0]
        raise IntegrityFailure(f"{directory} cannot be read by {program}: {message}") from error
    return ComparedModel(program, model, config, read_names("transformers"),
                         lambda tokens: model(input_ids=tokens, use_cache=False).logits[0])  # fmt: skip


def check_same(reference: ComparedModel, other: ComparedModel, where: Path) -> dict[str, Any]:
    """Compare weights bit by bit, and losses within TOLERANCE; return the programs and the largest difference.

    Raises IntegrityFailure naming the first weight, in order of the forward pass, or the losses that differ.
    """
    largest = float(np.abs(np.subtract(other.losses(), reference.losses())).max())
    difference = _first_weight(reference, other)
    if difference is None and not largest <= TOLERANCE:
        difference = f"a loss differs from that of {reference.program} by {largest:.1e}, tolerance {TOLERANCE:.1e}"
    if difference:
        raise IntegrityFailure(f"{where} is a different model according to {other.program}: {difference}")
    return {"programs": [reference.program, other.program], "largest": largest}


def _first_weight(reference: ComparedModel, other: ComparedModel) -> str | None:
    ours, theirs = reference.weights(), other.weights()
    for name, weight in ours.items():
        if name not in theirs or theirs[name].shape != weight.shape:
            return f"{name} is not there in the same shape"
        if not torch.equal(weight, theirs[name]):
            return f"{name} differs by at most {(weight - theirs[name]).abs().max():.1e}"
    return None
