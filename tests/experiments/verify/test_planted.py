"""Faults that engines really had, planted in a running Megatron-Core from outside: each is found, none is invented.

The ranks are forked from this process, so they inherit what `monkeypatch` changes in the imported package.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cli import read_run_config
from experiments.verify.trace_run import record_trace
from experiments.verify.traces import compare_traces
from experiments.verify.work import engine_class
from lineage.extras import import_extra

CONFIG = """
name = "tiny"
[model]
num_layers = 2
hidden_size = 32
num_heads = 4
seq_length = 16
vocab_size = 64
padded_vocab_size = 64
[train]
iterations = 100
global_batch_size = 4
microbatch_size = 2
learning_rate = 1e-2
warmup_iterations = 2
precision = "fp32"
"""
DRAWS = 4
Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


@pytest.fixture(scope="module", autouse=True)
def _engine() -> None:
    engine_class("megatron-core")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("traces")
    (made / "tiny.toml").write_text(CONFIG)
    return made


def record(folder: Path, name: str, engine: str, layout: str, draws: int = 0, dropout: float = 0.0, *more: str) -> Path:
    """A trace of two iterations."""
    config = read_run_config(folder / "tiny.toml", list(more))
    record_trace(config, engine, layout, 2, draws, folder / name, dropout)
    return folder / name


@pytest.fixture(scope="module")
def ours(folder: Path) -> Path:
    """The serial run of this engine."""
    return record(folder, "ours", "ours", "serial", DRAWS)


@pytest.fixture(scope="module")
def with_dropout(folder: Path) -> Path:
    """Megatron-Core's own run, whose masks no other engine has."""
    return record(folder, "masks", "megatron-core", "tp2", DRAWS, 0.1)


def core(name: str) -> Any:
    return import_extra(f"megatron.core.{name}", "test")


def forget_layernorm_gradients(patch: Patch) -> None:
    """What each rank saw of the sequence is not added up."""
    finalize = core("distributed.finalize_model_grads")
    patch.setattr(finalize, "_allreduce_non_tensor_model_parallel_grads", lambda *_: None)


def forget_tied_embedding(patch: Patch) -> None:
    """First and last stage do not add up what they share."""
    patch.setattr(core("distributed.finalize_model_grads"), "_allreduce_word_embedding_grads", lambda *_: None)


def sum_tied_embedding_twice(patch: Patch) -> None:
    finalize = core("distributed.finalize_model_grads")
    once = finalize._allreduce_word_embedding_grads
    patch.setattr(finalize, "_allreduce_word_embedding_grads", lambda *args: (once(*args), once(*args)))


def sum_over_data_parallel_ranks(patch: Patch) -> None:
    """Gradients are added up and not averaged."""
    groups = core("distributed.param_and_grad_buffer")._ParamAndGradBucketGroup
    start = groups.start_grad_sync

    def planted(self: Any, *args: Any, **kwargs: Any) -> None:
        for bucket in self.buckets:
            bucket.gradient_scaling_factor = 1.0
        start(self, *args, **kwargs)

    patch.setattr(groups, "start_grad_sync", planted)


def forget_data_parallel_ranks(patch: Patch) -> None:
    groups = core("distributed.param_and_grad_buffer")._ParamAndGradBucketGroup
    patch.setattr(groups, "finish_grad_sync", lambda *_, **__: None)


def seed_alike(patch: Patch) -> None:
    """Attention's masks are the same on every tensor-parallel rank."""
    seeds = core("tensor_parallel")
    seed = seeds.model_parallel_cuda_manual_seed
    patch.setattr(seeds, "model_parallel_cuda_manual_seed", lambda number: seed(number, tp_rank=0))


def seed_apart(patch: Patch) -> None:
    """The residual stream's masks are those of each rank, though all hold the same stream."""
    seeds = core("tensor_parallel")
    seed, rank = seeds.model_parallel_cuda_manual_seed, torch.distributed.get_rank
    patch.setattr(
        seeds, "model_parallel_cuda_manual_seed", lambda number: (seed(number), torch.manual_seed(number + rank()))
    )


def mask_words(patch: Patch) -> None:
    """The mask of padded rows begins eight rows early."""
    entropy = core("tensor_parallel.cross_entropy").VocabParallelCrossEntropy
    largest = entropy.calculate_logits_max

    def planted(logits: torch.Tensor) -> Any:
        is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        padding = torch.arange(logits.size(-1)) >= logits.size(-1) - 8 * is_last
        return largest(logits.float().masked_fill(padding, -1e4))

    patch.setattr(entropy, "calculate_logits_max", staticmethod(planted))


def add_bias_on_every_rank(patch: Patch) -> None:
    row = core("tensor_parallel.layers").RowParallelLinear
    forward = row.forward

    def planted(self: Any, x: torch.Tensor) -> Any:
        return forward(self, x)[0] + torch.distributed.get_world_size() * self.bias, None

    patch.setattr(row, "forward", planted)


def decay_biases(patch: Patch) -> None:
    patch.setattr(core("optimizer"), "get_standard_config_overrides", lambda **_: {})


def clip_by_local_norm(patch: Patch) -> None:
    norm = lambda gradients, **_: float(torch.nn.utils.get_total_norm(gradients))  # noqa: E731
    patch.setattr(core("optimizer.optimizer"), "get_grad_norm_fp32", norm)


def take_stale_microbatch(patch: Patch) -> None:
    """The last stage computes what came before again."""
    messages = core("pipeline_parallel.p2p_communication").P2PCommunicator
    seen: list[Any] = []

    def keep(receive: Callable[..., Any], stale: int) -> Callable[..., Any]:
        def planted(*args: Any) -> Any:
            seen.append(receive(*args))
            return [one if one is None else one.detach().requires_grad_() for one in seen[-stale]]

        return planted

    patch.setattr(messages, "recv_forward", keep(messages.recv_forward, 1))
    patch.setattr(messages, "send_backward_recv_forward", keep(messages.send_backward_recv_forward, 2))


def resume_schedule(patch: Patch) -> None:
    """A state is loaded into a schedule that has already moved on, and is added to it."""
    schedule = core("optimizer_param_scheduler").OptimizerParamScheduler
    step = schedule.step

    def planted(self: Any, increment: int) -> None:
        step(self, increment)
        if increment and "loaded" not in vars(self):
            self.loaded = True
            self.load_state_dict(self.state_dict())

    patch.setattr(schedule, "step", planted)


def forget_backward_all_reduce(patch: Patch) -> None:
    """The gradient of a divided product's input is that of this rank's columns."""
    column = core("tensor_parallel.layers").ColumnParallelLinear
    begin = column.__init__

    def planted(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.allreduce_dgrad, self.disable_grad_reduce = False, True

    patch.setattr(column, "__init__", planted)


WORDS = "embedding.word_embeddings.weight"
FAULTS = [
    (forget_layernorm_gradients, "tp2-sp", "gradient of final_layernorm.bias", 1),
    (forget_tied_embedding, "pp2", f"gradient of {WORDS}", 1),
    (sum_tied_embedding_twice, "pp2", f"gradient of {WORDS}", 1),
    (sum_over_data_parallel_ranks, "dp2", "gradient of final_layernorm.bias", 1),
    (forget_data_parallel_ranks, "dp2", "gradient of final_layernorm.bias", 1),
    (mask_words, "tp2", "loss", 1),
    (add_bias_on_every_rank, "tp2", "output of layers.0.self_attention.dense", 1),
    (decay_biases, "serial", "updated layers.0.input_layernorm.weight", 2),
    (clip_by_local_norm, "tp2", "gradient norm", 1),
    (take_stale_microbatch, "pp2", "output of layers.1.input_layernorm", 1),
    (resume_schedule, "serial", "learning rate", 2),
    (forget_backward_all_reduce, "tp2", "gradient of output of final_layernorm", 1),
]


@pytest.mark.parametrize(
    ("fault", "layout", "tensor", "iteration"), FAULTS, ids=[fault.__name__ for fault, *_ in FAULTS]
)
def test_a_planted_fault_is_found_and_its_first_tensor_named(
    fault: Fault, layout: str, tensor: str, iteration: int, folder: Path, ours: Path, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    found = compare_traces(ours, record(folder, fault.__name__, "megatron-core", layout)).first
    assert found is not None
    assert (found.tensor, found.iteration + 1) == (tensor, iteration)


@pytest.mark.parametrize(
    ("fault", "tensor"),
    [(seed_alike, "output of layers.0.self_attention.dense"), (seed_apart, "output of embedding")],
)
def test_dropout_that_is_equal_or_different_where_it_should_not_be_is_found(
    fault: Fault, tensor: str, folder: Path, with_dropout: Path, monkeypatch: Patch
) -> None:
    same = record(folder, f"before {fault.__name__}", "megatron-core", "tp2", 0, 0.1)
    assert compare_traces(with_dropout, same).first is None
    fault(monkeypatch)
    found = compare_traces(with_dropout, record(folder, fault.__name__, "megatron-core", "tp2", 0, 0.1)).first
    assert found is not None
    assert found.tensor == tensor
    assert "rank-1" in found.where


@pytest.mark.parametrize("layout", ["serial", "tp2", "dp2", "pp2", "tp2-sp"])
@pytest.mark.parametrize("change", ["train.seed=7", "train.microbatch_size=1"])
def test_a_run_without_a_fault_raises_no_alarm(layout: str, change: str, folder: Path) -> None:
    name = f"ours {change}"
    reference = (
        folder / name if (folder / name).exists() else record(folder, name, "ours", "serial", DRAWS, 0.0, change)
    )
    found = compare_traces(reference, record(folder, f"{layout} {change}", "megatron-core", layout, 0, 0.0, change))
    assert found.first is None
    assert found.only == ([], [])
    assert len(found.rows) > 250
