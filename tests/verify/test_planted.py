"""Faults that engines really had, planted in a running Megatron-Core from outside: each is found, none is invented.

The ranks are forked from this process, so they inherit what `monkeypatch` changes in the imported package.
"""

from pathlib import Path

import pytest

from engine.run.resolved import read_run_config
from tests.verify import faults
from tests.verify.conftest import CONFIG
from tests.verify.faults import Fault
from verify.against import compare_tensors, record
from verify.runner import Outcome, Reference, measured
from verify.work import engine_class


@pytest.fixture(scope="module", autouse=True)
def _engine() -> None:
    engine_class("megatron-core")  # once, before ranks are forked


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planted") / "tiny.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def ours(tiny: Path) -> Reference:
    """The serial run of this engine, of two iterations."""
    return measured(record(read_run_config(tiny), "ours", "serial", 2), "fp32")


@pytest.fixture(scope="module")
def with_dropout(tiny: Path) -> Reference:
    """Megatron-Core's own run, whose masks no other engine has."""
    return measured(record(read_run_config(tiny), "megatron-core", "tp2", 2, dropout=0.1), "fp32")


def beside(reference: Reference, tiny: Path, layout: str, dropout: float = 0.0, *more: str) -> Outcome:
    """Megatron-Core."""
    return compare_tensors(reference, read_run_config(tiny, list(more)), "megatron-core", layout, 2, dropout)


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
    fault: Fault, layout: str, tensor: str, iteration: int, tiny: Path, ours: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    found = beside(ours, tiny, layout).beyond[0]
    assert (found.tensor, found.iteration + 1) == (tensor, iteration)


@pytest.mark.parametrize(
    ("fault", "tensor"),
    [(faults.seed_alike, "output of layers.0.self_attention.dense"), (faults.seed_apart, "output of embedding")],
)
def test_dropout_that_is_equal_or_different_where_it_should_not_be_is_found(
    fault: Fault, tensor: str, tiny: Path, with_dropout: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert beside(with_dropout, tiny, "tp2", 0.1).beyond == []
    fault(monkeypatch)
    found = beside(with_dropout, tiny, "tp2", 0.1).beyond[0]
    assert found.tensor == tensor
    assert "rank 1" in found.where


@pytest.mark.parametrize("change", ["train.seed=7", "train.microbatch_size=1"])
def test_a_run_without_a_fault_raises_no_alarm(change: str, tiny: Path) -> None:
    reference = measured(record(read_run_config(tiny, [change]), "ours", "serial", 2), "fp32")
    for layout in ("serial", "tp2", "dp2", "pp2", "tp2-sp", "dp2-zero1"):
        found = beside(reference, tiny, layout, 0.0, change)
        extra = {tensor for rank in found.ranks for tensor in rank.extra}
        assert (found.beyond, found.absent, extra) == ([], [], {"loss of tokens"}), layout
        assert len(found.rows) > 250
