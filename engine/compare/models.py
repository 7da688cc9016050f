"""Compares two models window by window of tokens, each computed by its own program in fp32.

For the first eight windows every module output is compared; after that the loss only. If a loss differs, that window's
outputs are compared to find the first tensor. Shapes: s sequence, v vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from engine.compare.recorder import NameMap, Recorder, moved, read_names
from engine.compare.tensors import Key, TensorDifference, TensorPart, assemble, compare_all
from engine.compare.tolerance import DRAWS, FORMULA
from engine.config import ModelConfig
from engine.model.gpt2 import GPT2
from engine.parallel.mesh import serial_mesh
from lineage.errors import BadInput, IntegrityFailure
from lineage.extras import import_extra
from lineage.files import FileSchema

EXAMINED, SAMPLE_LENGTH = 8, 64
Window = tuple[NDArray[np.int64], int]
"""Token ids, and the number of scored tokens at the end. The model sees all tokens but the last."""


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
    def loss(self, window: Window, recorder: Recorder | None = None) -> float:
        """Mean cross-entropy of the window's scored tokens."""
        tokens, scored = torch.from_numpy(np.asarray(window[0], np.int64)), window[1]
        end = recorder.watch(self.module, [0]) if recorder else lambda: None
        logits = self.logits(tokens[None, :-1])[-scored:, : self.config.vocab_size]
        end()
        loss = F.cross_entropy(logits.float(), tokens[-scored:])
        if recorder:
            recorder.show("loss", loss)
        return loss.item()

    def record(self, windows: Sequence[Window], numbers: Sequence[int]) -> list[TensorPart]:
        """Loss and outputs of all mapped modules, for the windows with these numbers."""
        parts: list[TensorPart] = []
        recorder = Recorder(self.names, parts.append, heads=self.config.num_heads)
        for number in numbers:
            recorder.iteration = number
            self.loss(windows[number], recorder)
        return parts

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole tensors by our names, without padding rows of the vocabulary."""
        whole = {
            ours: self.names.in_our_order(ours, parameter.detach(), self.config.num_heads)
            for name, parameter in self.module.named_parameters()
            if (ours := self.names.ours(name, self.names.parameters, 0)) is not None
        }
        words = "embedding.word_embeddings.weight"
        return whole | {words: whole[words][: self.config.vocab_size]}

    @contextmanager
    def moved(self, draw: int) -> Iterator[None]:
        """Context manager: perturb every weight within its rounding error, then restore it."""
        with torch.no_grad():
            before = [parameter.clone() for parameter in self.module.parameters()]
            for name, parameter in self.module.named_parameters():
                parameter.copy_(moved(parameter, name, draw))
            yield
            for parameter, value in zip(self.module.parameters(), before, strict=True):
                parameter.copy_(value)


class Agreement(FileSchema):
    """Result of a comparison."""

    programs: tuple[str, str]
    weight: str | None
    """The first weight, in order of the forward pass, whose bits differ, and by how much."""
    windows: int
    """Number of compared windows, up to the first that differs."""
    largest: float
    """Largest difference of a window's mean loss."""
    tolerance: float
    """Tolerance of that loss."""
    tensor: str | None
    """The first window and tensor that differ by more than rounding, as a sentence."""
    formula: str = FORMULA

    @property
    def is_one_model(self) -> bool:
        """True if nothing differs."""
        return self.weight is None and self.tensor is None


def engine_model(model: GPT2) -> ComparedModel:
    """A whole model of this engine, in fp32."""
    return ComparedModel("this engine", model, model.config, read_names("ours"),
                         lambda tokens: model.logits(model.hidden_states(tokens)).squeeze(1))  # fmt: skip


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


def random_windows(config: ModelConfig) -> list[Window]:
    """Eight short windows of random tokens. They depend on vocabulary size and context alone."""
    length = min(config.seq_length, SAMPLE_LENGTH)
    tokens = np.random.RandomState(0).randint(config.vocab_size, size=(EXAMINED, length + 1))
    return [(row, length) for row in tokens]


def compare_models(
    reference: ComparedModel, other: ComparedModel, windows: Sequence[Window],
    on_progress: Callable[[int], None] = lambda count: None,
) -> Agreement:  # fmt: skip
    """Compare windows in order until one differs."""
    examined = min(EXAMINED, len(windows))
    first, rows = _examine(reference, other, windows, range(examined))
    losses = [row for row in rows if row.tensor == "loss" and (first is None or row.iteration <= first.iteration)]
    largest, tolerance = max(row.largest for row in losses), max(row.tolerance for row in losses)
    number = first.iteration if first else examined - 1
    on_progress(number + 1)
    while not first and number + 1 < len(windows):
        number += 1
        distance = abs(other.loss(windows[number]) - reference.loss(windows[number]))
        if not distance <= tolerance:
            first, rows = _examine(reference, other, windows, [number])
            tolerance = max(tolerance, *(row.tolerance for row in rows if row.tensor == "loss"))
        largest = max(largest, distance)
        on_progress(1)
    return Agreement(
        programs=(reference.program, other.program),
        weight=_first_weight(reference, other),
        windows=number + 1,
        largest=largest,
        tolerance=tolerance,
        tensor=first and f"{first.sentence(reference.program, 'window')}, tolerance {first.tolerance:.1e}",
    )


def _examine(
    reference: ComparedModel, other: ComparedModel, windows: Sequence[Window], numbers: Sequence[int]
) -> tuple[TensorDifference | None, list[TensorDifference]]:
    draws: list[dict[Key, NDArray[np.floating]]] = []
    whole = assemble(reference.record(windows, numbers))
    for draw in range(1, DRAWS + 1):
        with reference.moved(draw):
            draws.append(assemble(reference.record(windows, numbers)))
    return compare_all(whole, draws, {other.program: other.record(windows, numbers)}, "fp32")


def _first_weight(reference: ComparedModel, other: ComparedModel) -> str | None:
    ours, theirs = reference.weights(), other.weights()
    for name, weight in ours.items():
        if name not in theirs or theirs[name].shape != weight.shape:
            return f"{name} is not there in the same shape"
        if not torch.equal(weight, theirs[name]):
            return f"{name} differs by at most {(weight - theirs[name]).abs().max():.1e}"
    return None
