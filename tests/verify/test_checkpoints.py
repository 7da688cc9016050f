"""Weights go from this engine to Megatron-Core's `torch_dist`, are trained there, and come back bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.checkpoint import load_for_inference
from engine.cli import main
from engine.compare.tensors import TensorPart, assemble
from engine.config import RunConfig
from engine.formats import Imported, write_checkpoint
from engine.formats.convert import import_checkpoint
from engine.run.resolved import read_run_config
from tests.commands import Command
from tests.engine.test_formats_checkpoint import trained_tokenizer
from verify.engines import Work
from verify.megatron_core import MegatronCore, core
from verify.parity import ParityLayout
from verify.work import engine_class, on_ranks, shared_work

ITERATIONS = 20


def go_on(work: Work, layout: ParityLayout, start: str, save: str) -> tuple[list[float], list[TensorPart]]:
    """Losses and weights of Megatron-Core when it goes on from the checkpoint `start`; saves to `save`."""
    engine: Any = MegatronCore(work, layout)
    loaded = core("dist_checkpointing").load({"model": engine.gpt.sharded_state_dict()}, start)
    engine.gpt.load_state_dict(loaded["model"])
    engine.optimizer.reload_model_params()
    losses = [engine.step(iteration).loss for iteration in range(work.iterations)]
    pieces: list[TensorPart] = []
    engine.show_weights(engine.recorder(pieces.append))
    content = {"model": engine.gpt.sharded_state_dict(), "iteration": ITERATIONS, "checkpoint_version": 3.0}
    core("dist_checkpointing").save(content, save)
    return losses, pieces


def trained(layout: str, config: RunConfig, tmp_path: Path, command: Command) -> None:
    """There from a checkpoint of ours, 20 iterations, and back."""
    kind = engine_class("megatron-core")
    with shared_work(config, layout, ITERATIONS, nudges=True) as (work, chosen):
        tokenizer = trained_tokenizer()
        model = work.config.model.model_copy(update={"vocab_size": tokenizer.vocab_size})
        assert work.initial
        write_checkpoint(tmp_path / "ours", Imported("ours", model, work.initial, tokenizer, {}))
        done = command(main, "mlm-train", "export", tmp_path / "ours", tmp_path / "theirs", "--format", "torch-dist")
        assert done.code == 0
        save = tmp_path / "saved" / f"iter_{ITERATIONS:07d}"
        save.mkdir(parents=True)
        (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text(str(ITERATIONS))
        start = str(tmp_path / "theirs" / "release")
        elsewhere = Work(work.config, ITERATIONS, work.tokens, initial=None)  # its weights are those of the checkpoint
        ranks = on_ranks(rank, chosen, kind, elsewhere, chosen, start, str(save))
        expected = [step.loss for step in on_ranks(plain, chosen, kind, work, chosen)[0]]
    assert ranks[0][0] == expected
    heads = config.model.num_heads
    back = import_checkpoint(tmp_path / "saved", tmp_path / "back", tmp_path / "theirs", heads)
    loaded = dict(load_for_inference(back).model.named_parameters())
    weights = assemble(piece for _, pieces in ranks for piece in pieces)
    assert len(weights) == len(loaded)
    for (_, name), whole in weights.items():
        assert torch.equal(loaded[name.removeprefix("updated ")], torch.as_tensor(whole)), name


def rank(kind: Any, *args: Any) -> Any:
    return go_on(*args)


def plain(kind: Any, work: Work, layout: ParityLayout) -> Any:
    """The same training from weights that were handed over in memory."""
    engine = kind(work, layout)
    return [engine.step(iteration) for iteration in range(work.iterations)]


@pytest.mark.parametrize("layout", ["serial", "tp2", "pp2-dp2-zero1"])
def test_weights_are_trained_there_and_come_back(layout: str, config: Path, tmp_path: Path, command: Command) -> None:
    overrides = ["model.vocab_size=270", "model.padded_vocab_size=384"]
    trained(layout, read_run_config(config, overrides), tmp_path, command)
