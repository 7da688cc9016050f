"""transformers' GPT-2 as an engine of one rank, which this suite's own engine is held against."""

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional as F

from benchmarks.contenders import adamw, huggingface
from mlm_repro.engine.compare.recorder import Recorder, read_names
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.lineage.extras import import_extra
from mlm_repro.verify.engines import Engine, Shard, Work
from mlm_repro.verify.parity import ParityLayout


class Transformers(Engine):
    """GPT2LMHeadModel and torch's AdamW in a plain loop."""

    @classmethod
    def prepare(cls) -> None:
        import_extra("transformers.models.gpt2.modeling_gpt2", "bench")

    @classmethod
    def release(cls) -> str:
        return str(import_extra("transformers", "bench").__version__)

    def __init__(self, work: Work, layout: ParityLayout) -> None:
        self.work, self.names_of_ours = work, read_names("transformers")
        self.module = huggingface(work.config.model)
        self.optimizer = adamw(self.module, work.config.train)
        self.inputs = work.inputs(work.config, serial_mesh())

    def shards(self, named: Mapping[str, torch.Tensor]) -> list[Shard]:
        names, heads = self.names_of_ours, self.work.config.model.num_heads
        return [
            Shard(name, ours, (0,) * value.dim(), names.in_our_order(ours, value, heads))
            for name, value in named.items()
            if (ours := names.ours(name, names.parameters, 0))
        ]

    @torch.no_grad()
    def assign(self, value_of: Callable[[Shard], torch.Tensor]) -> None:
        for shard in self.shards(dict(self.parameters())):
            value = self.names_of_ours.in_their_order(
                shard.key, value_of(shard), self.work.config.model.num_heads
            )
            self.module.get_parameter(shard.parameter).copy_(value)

    def backward(self, iteration: int, recorder: Recorder | None) -> float:
        microbatches, total = self.inputs.of(iteration), 0.0
        self.optimizer.zero_grad()
        for microbatch in microbatches:
            logits = self.module(input_ids=microbatch.tokens, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), microbatch.targets.flatten()) / len(
                microbatches
            )
            loss.backward()
            total += loss.item()
        return total

    def update(self, iteration: int) -> tuple[float, float]:
        limit, rate = (
            self.work.config.train.clip_gradient or float("inf"),
            self.work.rate(iteration),
        )
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), limit).item()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return norm, rate
