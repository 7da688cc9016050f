"""What experiments measure without training is what their closed forms say, and is sealed as a scaled number."""

from pathlib import Path

import pytest

from engine.config import ModelConfig, ParallelConfig
from engine.costs import parameter_count
from engine.launch.forked import run_forked
from experiments.catalogue import find_experiment
from experiments.measured import huggingface, run, zero
from experiments.measured.products import measure_products
from experiments.runner import run_named
from experiments.verdicts import judge, load_results
from lineage.errors import HardwareMissing
from lineage.records import read_records

MODEL = ModelConfig(
    num_layers=4, hidden_size=16, num_heads=4, seq_length=8, vocab_size=20, padded_vocab_size=20, dropout=0.0
)


@pytest.mark.parametrize(
    ("parallel", "whole", "layers"),
    [
        (ParallelConfig(), 2, 0),
        (ParallelConfig(shard_optimizer=True), 2, 0),
        (ParallelConfig(shard_parameters=True), 2, 1),
    ],
    ids=["data parallel", "stage 1", "stage 3"],
)
def test_every_byte_of_data_parallelism_and_zero_is_accounted_for(
    parallel: ParallelConfig, whole: int, layers: int
) -> None:
    """Gradients reduced (2Ψ); in stage 1 scattered (Ψ), then weights gathered (Ψ). In stage 3 a pass gathers twice,
    scatters once.

    The embedding and the last norm stay gathered between a pass's forward and backward.
    """
    in_layers = MODEL.num_layers * (12 * MODEL.hidden_size**2 + 13 * MODEL.hidden_size)
    once = 4 * (whole * parameter_count(MODEL) + layers * in_layers)
    for sent in run_forked(sent_by, 2, parallel, (2, 4)):
        assert sent == [once / 2, once if parallel.shard_parameters else once / 2]


def sent_by(parallel: ParallelConfig, batches: tuple[int, ...]) -> list[float]:
    return [zero.iteration(MODEL, parallel, batch).sent for batch in batches]


def test_a_layer_all_reduces_four_times_and_a_border_is_crossed_twice() -> None:
    batch = 4
    bsh = 4 * batch * MODEL.seq_length * MODEL.hidden_size
    tensor, pipeline = (run_forked(sent_by, 2, ParallelConfig(**one), (batch,)) for one in ({"tp": 2}, {"pp": 2}))
    fewer = run_forked(layerless, 2, batch)
    assert tensor[0][0] - fewer[0] == pytest.approx(2 * 4 * bsh)  # two layers; a ring of two sends all that it reduces
    tied = 4 * MODEL.vocab_size * MODEL.hidden_size
    assert 2 * bsh <= sum(rank[0] for rank in pipeline) <= 2 * bsh + 3 * tied


def layerless(batch: int) -> float:
    return zero.iteration(MODEL.model_copy(update={"num_layers": 2}), ParallelConfig(tp=2), batch).sent


def test_a_divided_model_of_hugging_face_is_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"num_layers": 2, "hidden_size": 32, "vocab_size": 50, "padded_vocab_size": 128, "seq_length": 16}
    monkeypatch.setattr(huggingface, "SHAPE", huggingface.SHAPE.model_copy(update=shape))
    monkeypatch.setattr(huggingface, "WIDTHS", (1, 2))
    monkeypatch.setattr(huggingface, "TOKENS", 8)
    monkeypatch.setattr(huggingface, "NEW_TOKENS", 4)
    monkeypatch.setattr(huggingface, "collectives_per_layer", lambda: 4.0)
    values = {line["quantity"]: line["value"] for line in huggingface.measure_huggingface()}
    assert values["largest_logit_difference"] < 1e-5
    assert values["identical_generations_percent"] == values["identical_files_percent"] == 100


def test_products_are_compared_at_a_multiple_of_8_and_one_above() -> None:
    lines = measure_products(rounds=1, largest=64)
    assert {(one["series"], one["x"]) for one in lines if one["quantity"] == "product_gflops"} == {
        (f"{precision}, {where}", n) for precision in ("fp32", "bf16", "fp16")
        for where, n in (("multiple of 8", 64.0), ("one more", 65.0))
    }  # fmt: skip
    ratios = {one["quantity"]: one["value"] for one in lines if one["series"] == "fp16 over fp32"}
    assert set(ratios) == {"gemm_speedup", "gemm_speedup_shifted"}
    assert min(ratios.values()) > 0


def test_an_experiment_that_measures_seals_scaled_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    line = {"series": "optimizer states", "quantity": "communication_ratio", "kind": "scaled", "value": 1.5}
    monkeypatch.setattr(run, "_measure", lambda name: [line])
    experiment = find_experiment("zero/communication")
    for _ in range(2):
        run_named([experiment], "auto", tmp_path)
    (directory,) = (path for path in tmp_path.iterdir() if not path.is_symlink())
    (record,) = read_records(directory / "records.jsonl")
    assert (record.experiment, record.source) == ("zero/communication", directory.name)
    outcomes = {one.claim.series: one.outcome for one in judge([experiment], load_results([tmp_path]))}
    assert outcomes["optimizer states"] == "NOT_RUN"
    assert "measured on this machine" in capfd.readouterr().out
    with pytest.raises(HardwareMissing):
        run_named([experiment], "measure", tmp_path)


def test_what_zero_s_table_says_is_computed(tmp_path: Path) -> None:
    for name in ("zero/memory", "gpipe/bubble"):
        experiment = find_experiment(name)
        run_named([experiment], "simulate", tmp_path)
        outcomes = [one.outcome for one in judge([experiment], load_results([tmp_path]))]
        assert set(outcomes) <= {"CONSISTENT", "NOT_RUN"}
        assert outcomes.count("CONSISTENT") == {"zero/memory": 4, "gpipe/bubble": 12}[name]
