"""Engines of one rank: the GPT-2 of transformers and of nanoGPT, trained with torch's AdamW and clipping."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch

from data_pipeline.tokens.token_file import TokenFile
from engine.compare.recorder import RankPlace, Recorder, read_names
from engine.inputs import TrainingInputs
from engine.parallel.mesh import serial_mesh
from lineage.errors import BadInput
from lineage.extras import import_extra
from verify import peers
from verify.engines import Engine, Named, Work
from verify.parity import SERIAL, ParityLayout


class TorchPeer(Engine):
    """A module that returns its loss, trained in a plain loop."""

    map_name: ClassVar[str]

    def __init__(self, work: Work, layout: ParityLayout) -> None:
        train = work.config.train
        if layout != SERIAL or train.precision != "fp32" or work.config.model.dropout:
            raise BadInput(f"{self.map_name} is run on one rank, in fp32 and without dropout")
        self.work, self.place, self.names = work, RankPlace(), read_names(self.map_name)
        self.model, self.loss = self.build()
        if work.initial:
            self.load(work.initial)
        self.optimizer = peers.adamw(self.model, train)
        tokens = [(TokenFile(prefix), weight) for prefix, weight in work.tokens]
        self.inputs = TrainingInputs(work.config, work.iterations, tokens, work.tokenizer, serial_mesh())

    @abstractmethod
    def build(self) -> tuple[torch.nn.Module, peers.Loss]:
        """Build the module and its loss."""

    def parameters(self) -> Named:
        return self.model.named_parameters()

    def backward(self, iteration: int, recorder: Recorder | None) -> float:
        """Run the microbatches of an iteration one after the other."""
        microbatches, total = self.inputs.of(iteration), 0.0
        starts = [microbatch.places[0] for microbatch in microbatches]
        end = recorder.watch(self.model, starts, len(starts)) if recorder else lambda: None
        self.optimizer.zero_grad()
        for microbatch, start in zip(microbatches, starts, strict=True):
            loss = self.loss(self.model, microbatch.tokens, microbatch.targets)
            if recorder:
                recorder.loss(loss, start, self.work.config.train.microbatch_size)
            (loss / len(starts)).backward()
            total += loss.item() / len(starts)
        end()
        return total

    def gradients(self) -> Named:
        return (
            (name, parameter.grad) for name, parameter in self.model.named_parameters() if parameter.grad is not None
        )

    def update(self, iteration: int) -> tuple[float, float]:
        """Clip, then update with AdamW."""
        limit, rate = self.work.config.train.clip_gradient or float("inf"), self.work.rate(iteration)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit).item()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return norm, rate

    def state(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield from ((name, what, self.optimizer.state[parameter][what]) for what in ("exp_avg", "exp_avg_sq"))


class Transformers(TorchPeer):
    """transformers' GPT2LMHeadModel."""

    map_name = package = "transformers"

    @classmethod
    def prepare(cls) -> None:
        """Import transformers."""
        import_extra("transformers.models.gpt2.modeling_gpt2", "bench")

    def build(self) -> tuple[torch.nn.Module, peers.Loss]:
        """Build Hugging Face's module."""
        return peers.huggingface(self.work.config.model)


class NanoGPTEngine(TorchPeer):
    """nanoGPT's model."""

    map_name = "nanogpt"

    def build(self) -> tuple[torch.nn.Module, peers.Loss]:
        """Return nanoGPT's module."""
        return peers.NanoGPTModel(self.work.config.model), torch.nn.Module.__call__
