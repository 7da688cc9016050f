"""The number and size of messages per layer and iteration are the papers'."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from engine.config import ModelConfig, ParallelConfig, TrainConfig
from engine.costs import parameter_count
from engine.launch.mesh import build_mesh
from engine.model.microbatch import PipelineInput
from engine.optim.adam import FlatAdamW
from engine.parallel import mesh
from engine.parallel.layout import Layout
from engine.pipeline.executor import PartitionedModel
from engine.rng import Dropout
from tests.ranks import run_ranks

MODEL = ModelConfig(num_layers=4, hidden_size=16, num_heads=4, seq_length=8, vocab_size=29, padded_vocab_size=32)
BATCH, MICROBATCHES = 2, 4
ACTIVATION = MODEL.seq_length * BATCH * MODEL.hidden_size
"""Elements of one microbatch's residual stream, s·b·h."""
COUNTED = (dist, "all_reduce"), (dist, "all_gather"), (dist, "isend"), (mesh, "reduce_scatter_single")

Calls = Counter[tuple[str, int]]


def count_calls(layout: Layout, parallel: ParallelConfig) -> Calls:
    """(collective, elements handed in) → calls, of one iteration on this rank."""
    ranks = build_mesh(layout, parallel.sequence_parallel)
    model = PartitionedModel(MODEL, parallel, ranks, torch.float32, seed=1)
    optimizer = FlatAdamW(model.parameters, TrainConfig(), ranks)
    reducer = model.reducer(optimizer.groups)
    rows = torch.from_numpy(np.random.RandomState(0).randint(0, 29, (MICROBATCHES, BATCH, MODEL.seq_length + 1)))
    batches = [
        PipelineInput(row[:, :-1], row[:, 1:], Dropout(0.1, 1, 0, (2 * i, 2 * i + 1))) for i, row in enumerate(rows)
    ]
    calls: Calls = Counter()

    def counting(name: str, original: Any) -> Any:
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            payload = args[0] if name in ("all_gather", "reduce_scatter_single") else tensor
            calls[name, payload.numel()] += 1
            return original(tensor, *args, **kwargs)

        return call

    originals = [getattr(module, name) for module, name in COUNTED]
    try:
        for (module, name), original in zip(COUNTED, originals, strict=True):
            setattr(module, name, counting(name, original))
        model.forward_backward(batches, reducer)
        reducer.finish(1)
    finally:
        for (module, name), original in zip(COUNTED, originals, strict=True):
            setattr(module, name, original)
    return calls


def test_tensor_parallelism_has_two_all_reduces_a_layer_each_way() -> None:
    calls = run_ranks(count_calls, 2, Layout(tp=2), ParallelConfig(tp=2))[0]
    layers, embedding_and_head = 4 * MODEL.num_layers, 2
    assert calls["all_reduce", ACTIVATION] == (layers + embedding_and_head) * MICROBATCHES
    maximum, sum_and_target = MODEL.seq_length * BATCH, 2 * MODEL.seq_length * BATCH
    assert calls["all_reduce", maximum] == calls["all_reduce", sum_and_target] == MICROBATCHES
    assert sum(calls.values()) == (layers + embedding_and_head + 2) * MICROBATCHES


def test_recomputation_adds_one_all_reduce_a_layer() -> None:
    """Of the forward pass's two: recomputation ends when the backward pass has all it needs, before the MLP's."""
    calls = run_ranks(count_calls, 2, Layout(tp=2), ParallelConfig(tp=2, recompute="full"))[0]
    assert calls["all_reduce", ACTIVATION] == (5 * MODEL.num_layers + 2) * MICROBATCHES


def test_sequence_parallelism_gathers_and_scatters_instead() -> None:
    calls = run_ranks(count_calls, 2, Layout(tp=2), ParallelConfig(tp=2, sequence_parallel=True))[0]
    assert calls["all_reduce", ACTIVATION] == 0
    each_way, inputs_again = 4 * MODEL.num_layers + 2, 2 * MODEL.num_layers  # two of embedding and head
    assert calls["all_gather", ACTIVATION // 2] == (each_way + inputs_again) * MICROBATCHES
    assert calls["reduce_scatter_single", ACTIVATION] == each_way * MICROBATCHES


@pytest.mark.parametrize("scatter_gather", [True, False])
def test_pipeline_messages(scatter_gather: bool) -> None:
    """One activation and one gradient between neighbours per microbatch; with scatter/gather 1/t of it each."""
    parallel = ParallelConfig(tp=2, pp=2, scatter_gather=scatter_gather)
    ranks = run_ranks(count_calls, 4, Layout(tp=2, pp=2), parallel)
    size = ACTIVATION // 2 if scatter_gather else ACTIVATION
    for calls in ranks:
        assert {key: n for key, n in calls.items() if key[0] == "isend"} == {("isend", size): MICROBATCHES}
        assert calls["all_gather", size] == (MICROBATCHES if scatter_gather else 0)


def test_interleaving_sends_as_many_times_more_as_there_are_chunks() -> None:
    parallel = ParallelConfig(pp=2, chunks=2, schedule="interleaved")
    ranks = run_ranks(count_calls, 2, Layout(pp=2), parallel)
    stages = 4
    assert sum(calls["isend", ACTIVATION] for calls in ranks) == 2 * (stages - 1) * MICROBATCHES


def test_data_parallelism_reduces_each_gradient_once() -> None:
    calls = run_ranks(count_calls, 2, Layout(dp=2), ParallelConfig())[0]
    assert {name for name, _ in calls} == {"all_reduce"}
    assert sum(elements * n for (_, elements), n in calls.items()) == parameter_count(MODEL)
