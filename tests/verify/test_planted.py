"""Faults that engines really had, planted in a running Megatron-Core from outside: each is found, none is invented.

The ranks are forked from this process, so they inherit what `monkeypatch` changes in the imported package.
"""

from pathlib import Path

import pytest

from engine.run.resolved import read_run_config
from tests.verify import faults
from tests.verify.conftest import CONFIG
from tests.verify.faults import Fault
from verify.tensors import Recorded, compare_recorded, record
from verify.work import engine_class

DRAWS = 4


@pytest.fixture(scope="module", autouse=True)
def _engine() -> None:
    engine_class("megatron-core")  # once, before ranks are forked


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planted") / "tiny.toml"
    path.write_text(CONFIG)
    return path


def recorded(tiny: Path, engine: str, layout: str, draws: int = 0, dropout: float = 0.0, *more: str) -> Recorded:
    """Two iterations."""
    return record(read_run_config(tiny, list(more)), engine, layout, 2, draws, dropout)


@pytest.fixture(scope="module")
def ours(tiny: Path) -> Recorded:
    """The serial run of this engine."""
    return recorded(tiny, "ours", "serial", DRAWS)


@pytest.fixture(scope="module")
def with_dropout(tiny: Path) -> Recorded:
    """Megatron-Core's own run, whose masks no other engine has."""
    return recorded(tiny, "megatron-core", "tp2", DRAWS, 0.1)


WORDS = "embedding.word_embeddings.weight"
FAULTS = [
    (faults.forget_layernorm_gradients, "tp2-sp", "gradient of final_layernorm.bias", 1),
    (faults.forget_tied_embedding, "pp2", f"gradient of {WORDS}", 1),
    (faults.sum_tied_embedding_twice, "pp2", f"gradient of {WORDS}", 1),
    (faults.sum_over_data_parallel_ranks, "dp2", "gradient of final_layernorm.bias", 1),
    (faults.forget_data_parallel_ranks, "dp2", "gradient of final_layernorm.bias", 1),
    (faults.mask_words, "tp2", "loss", 1),
    (faults.add_bias_on_every_rank, "tp2", "output of layers.0.self_attention.dense", 1),
    (faults.decay_biases, "serial", "updated layers.0.input_layernorm.weight", 2),
    (faults.clip_by_local_norm, "tp2", "gradient norm", 1),
    (faults.take_stale_microbatch, "pp2", "output of layers.1.input_layernorm", 1),
    (faults.resume_schedule, "serial", "learning rate", 2),
    (faults.forget_backward_all_reduce, "tp2", "gradient of output of final_layernorm", 1),
]


@pytest.mark.parametrize(
    ("fault", "layout", "tensor", "iteration"), FAULTS, ids=[fault.__name__ for fault, *_ in FAULTS]
)
def test_a_planted_fault_is_found_and_its_first_tensor_named(
    fault: Fault, layout: str, tensor: str, iteration: int, tiny: Path, ours: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    found = compare_recorded(ours, recorded(tiny, "megatron-core", layout), "fp32").first
    assert found is not None
    assert (found.tensor, found.iteration + 1) == (tensor, iteration)


@pytest.mark.parametrize(
    ("fault", "tensor"),
    [(faults.seed_alike, "output of layers.0.self_attention.dense"), (faults.seed_apart, "output of embedding")],
)
def test_dropout_that_is_equal_or_different_where_it_should_not_be_is_found(
    fault: Fault, tensor: str, tiny: Path, with_dropout: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = recorded(tiny, "megatron-core", "tp2", 0, 0.1)
    assert compare_recorded(with_dropout, same, "fp32").first is None
    fault(monkeypatch)
    found = compare_recorded(with_dropout, recorded(tiny, "megatron-core", "tp2", 0, 0.1), "fp32").first
    assert found is not None
    assert found.tensor == tensor
    assert "rank-1" in found.where


@pytest.mark.parametrize("change", ["train.seed=7", "train.microbatch_size=1"])
def test_a_run_without_a_fault_raises_no_alarm(change: str, tiny: Path) -> None:
    reference = recorded(tiny, "ours", "serial", DRAWS, 0.0, change)
    for layout in ("serial", "tp2", "dp2", "pp2", "tp2-sp"):
        found = compare_recorded(reference, recorded(tiny, "megatron-core", layout, 0, 0.0, change), "fp32")
        assert (found.first, found.only) == (None, ([], [])), layout
        assert len(found.rows) > 250
