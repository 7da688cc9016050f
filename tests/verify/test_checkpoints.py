"""Weights that Megatron-Core trains and saves as `torch_dist` are read bit for bit."""

from pathlib import Path

import pytest
import torch

from mlm_repro.engine.formats.convert import import_checkpoint
from mlm_repro.engine.formats.vocabulary import write_vocabulary
from mlm_repro.engine.inference import load_for_inference
from mlm_repro.engine.run.resolved import read_run_config
from mlm_repro.verify.against import engine_class, shared_work
from mlm_repro.verify.engines import Work
from mlm_repro.verify.megatron_core import MegatronCore, core
from mlm_repro.verify.parity import ParityLayout
from mlm_repro.verify.runner import UNKNOWN, Computed, Reference, on_ranks
from tests.engine.test_formats_checkpoint import trained_tokenizer

ITERATIONS = 20


def train_and_save(
    kind: type[MegatronCore], work: Work, layout: ParityLayout, _: Reference, save: str
) -> Computed:
    """Weights of Megatron-Core after training, which it also saves to `save`."""
    engine, seen = kind(work, layout), Computed()
    engine.run()
    engine.show(engine.recorder(seen.parts.append), "updated ", engine.parameters())
    content = {
        "model": engine.gpt.sharded_state_dict(),
        "iteration": ITERATIONS,
        "checkpoint_version": 3.0,
    }
    core("dist_checkpointing").save(content, save)
    return seen


@pytest.mark.parametrize("layout", ["serial", "tp2", "pp2-dp2-zero1"])
def test_weights_that_were_trained_there_are_read(
    layout: str, config: Path, tmp_path: Path
) -> None:
    changed = read_run_config(config, ["model.vocab_size=270", "model.padded_vocab_size=384"])
    save = tmp_path / "saved" / f"iter_{ITERATIONS:07d}"
    save.mkdir(parents=True)
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text(str(ITERATIONS))
    with shared_work(changed, layout, ITERATIONS) as (work, chosen):
        trained = on_ranks(
            train_and_save, engine_class("megatron-core"), work, chosen, UNKNOWN, str(save)
        )
    vocab = tmp_path / "vocab"
    write_vocabulary(trained_tokenizer(), vocab, changed.model.seq_length)
    back = import_checkpoint(tmp_path / "saved", tmp_path / "back", vocab, changed.model.num_heads)
    loaded = dict(load_for_inference(back).model.named_parameters())
    weights = trained.whole
    assert len(weights) == len(loaded)
    for (_, name), weight in weights.items():
        assert torch.equal(loaded[name.removeprefix("updated ")], torch.as_tensor(weight)), name
