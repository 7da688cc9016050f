"""nanoGPT as a contender: its model with this engine's initial weights, in a loop as such programs write it."""

from dataclasses import dataclass

import torch

from engine.launch.mesh import local_device
from engine.model.gpt2 import GPT2
from engine.parallel.mesh import serial_mesh
from experiments.iterations import Step, TrainingSize
from verify.peers import NanoGPTModel, adamw, their_weights


@dataclass(frozen=True)
class Peer:
    """nanoGPT's model on one rank."""

    name: str
    is_tuned: bool = True
    is_compiled: bool = False
    """True if torch.compile compiles the model."""
    ranks: int = 1

    def build(self, size: TrainingSize) -> Step:
        """Return a step of the model."""
        network = GPT2(size.model, serial_mesh())
        network.initialize(size.train.seed)
        model = NanoGPTModel(size.model)
        model.load_theirs(their_weights(network))
        train, device = size.train, local_device()
        model.to(device).train()
        parameters = list(model.parameters())
        optimizer = adamw(model, train, fused=self.is_tuned)
        dropouts = [each for each in model.modules() if isinstance(each, torch.nn.Dropout)]
        if self.is_compiled:
            model.compile()
        torch.manual_seed(train.seed)

        def step(iteration: int, dropout: float) -> float:
            for each in dropouts:
                each.p = dropout
            rows = torch.from_numpy(size.batch(iteration)).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=train.precision == "bf16"):
                value = model(rows[:, :-1], rows[:, 1:])
            value.backward()
            torch.nn.utils.clip_grad_norm_(parameters, train.clip_gradient)
            optimizer.step()
            optimizer.zero_grad()
            loss: float = value.item()
            return loss

        return step
