"""transformers' GPT-2 and nanoGPT's on one rank, trained by torch's AdamW and clipping, as engines."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from data_pipeline.tokens.token_file import TokenFile
from engine.inputs import TrainingInputs
from engine.parallel.mesh import serial_mesh
from experiments.bench.nanogpt import nanogpt
from experiments.bench.peers import Loss, call, huggingface, parameter_groups
from experiments.verify.engines import Engine, StepResult, Work
from experiments.verify.parity import SERIAL, ParityLayout
from experiments.verify.recorder import RankPlace, Recorder, read_names
from lineage.errors import BadInput


class TorchPeer(Engine):
    """A module that returns its loss, in a loop as such programs write it."""

    map_name: ClassVar[str]

    def __init__(self, work: Work, layout: ParityLayout) -> None:
        train = work.config.train
        if layout != SERIAL or train.precision != "fp32" or work.config.model.dropout:
            raise BadInput(f"{self.map_name} is run on one rank, in fp32 and without dropout")
        self.work, self.place, self.names = work, RankPlace(), read_names(self.map_name)
        self.model, self.loss = self.build()
        if work.initial:
            self.load(work.initial, work)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, train.weight_decay), lr=1.0, betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_epsilon,
        )  # fmt: skip
        tokens = [(TokenFile(prefix), weight) for prefix, weight in work.tokens]
        self.inputs = TrainingInputs(work.config, work.iterations, tokens, work.tokenizer, serial_mesh())

    def build(self) -> tuple[torch.nn.Module, Loss]:
        """The module and its loss."""
        raise NotImplementedError

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """By the module's own names."""
        yield from self.model.named_parameters()

    def take_weights(self) -> None:
        """The optimizer works on the parameters themselves."""

    def step(self, iteration: int, recorder: Recorder | None = None) -> StepResult:
        """Forward and backward of every microbatch, clipping, AdamW."""
        train, microbatches = self.work.config.train, self.inputs.of(iteration)
        count, rate = len(microbatches), self.work.rate(iteration)
        end = recorder.watch(self.model, [one.places[0] for one in microbatches], count) if recorder else lambda: None
        self.optimizer.zero_grad()
        total = 0.0
        for number, one in enumerate(microbatches):
            loss = self.loss(self.model, one.tokens, one.targets)
            if recorder:
                recorder.show("loss", loss.view(1), (number,))
            (loss / count).backward()
            total += loss.item() / count
        end()
        if recorder:
            for name, parameter in self.model.named_parameters():
                recorder.parameter("gradient of ", name, parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), train.clip_gradient or float("inf")).item()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        if recorder:
            self._show_update(recorder, {"mean loss": total, "gradient norm": norm, "learning rate": rate})
        return StepResult(total, norm, rate)

    def _show_update(self, recorder: Recorder, numbers: dict[str, Any]) -> None:
        for tensor, number in numbers.items():
            recorder.show(tensor, number)
        for name, parameter in self.model.named_parameters():
            for what in ("exp_avg", "exp_avg_sq"):
                recorder.parameter(f"{what} of ", name, self.optimizer.state[parameter][what])
            recorder.parameter("updated ", name, parameter)


class Transformers(TorchPeer):
    """transformers' GPT2LMHeadModel."""

    map_name = "transformers"

    def build(self) -> tuple[torch.nn.Module, Loss]:
        """The module and its loss."""
        return huggingface(self.work.config.model)


class NanoGPT(TorchPeer):
    """The model of `experiments.bench.nanogpt`."""

    map_name = "nanogpt"

    def build(self) -> tuple[torch.nn.Module, Loss]:
        """The module and its loss."""
        return nanogpt(self.work.config.model)[0], call
