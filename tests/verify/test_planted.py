"""Faults that engines really had, planted in a running Megatron-Core from outside: each is found, none is invented.

The ranks are forked from this process, so they inherit what `monkeypatch` changes in the imported package.
"""

from pathlib import Path

import pytest

from engine.run.resolved import read_run_config
from tests.verify import faults
from tests.verify.conftest import CONFIG
from tests.verify.faults import Fault
from verify.traces import compare_traces
from verify.work import engine_class, record_trace

DRAWS = 4


@pytest.fixture(scope="module", autouse=True)
def _engine() -> None:
    engine_class("megatron-core")  # once, before ranks are forked


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
    fault: Fault, layout: str, tensor: str, iteration: int, folder: Path, ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    found = compare_traces(ours, record(folder, fault.__name__, "megatron-core", layout)).first
    assert found is not None
    assert (found.tensor, found.iteration + 1) == (tensor, iteration)


@pytest.mark.parametrize(
    ("fault", "tensor"),
    [(faults.seed_alike, "output of layers.0.self_attention.dense"), (faults.seed_apart, "output of embedding")],
)
def test_dropout_that_is_equal_or_different_where_it_should_not_be_is_found(
    fault: Fault, tensor: str, folder: Path, with_dropout: Path, monkeypatch: pytest.MonkeyPatch
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
