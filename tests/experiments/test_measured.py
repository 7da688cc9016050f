"""What experiments measure without training is what their closed forms say; what is wrong turns its
verdict."""

from pathlib import Path
from typing import Any

import pytest

from mlm_repro.engine.config import ModelConfig, ParallelConfig
from mlm_repro.engine.costs import parameter_count
from mlm_repro.engine.launch.forked import run_forked
from mlm_repro.engine.parallel import layers
from mlm_repro.evaluation.schema import ClozeResult, PerplexityResult
from mlm_repro.evaluation.tasks.names import TASKS
from mlm_repro.experiments import runner
from mlm_repro.experiments.catalogue import find_experiment
from mlm_repro.experiments.measured import activations, huggingface, memory, traffic
from mlm_repro.experiments.measured.released import MODELS
from mlm_repro.experiments.runner import run_named
from mlm_repro.experiments.sealed import Line, seal_numbers
from mlm_repro.experiments.verdicts import judge, load_results
from mlm_repro.lineage.errors import DataMissing
from mlm_repro.lineage.records import read_records

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=16,
    num_heads=4,
    seq_length=8,
    vocab_size=20,
    padded_vocab_size=20,
    dropout=0.0,
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
def test_every_byte_of_data_parallelism_and_zero_is_counted(
    parallel: ParallelConfig, whole: int, layers: int
) -> None:
    """Gradients reduced (2Ψ); in stage 1 scattered (Ψ), then weights gathered (Ψ). In stage 3 a
    pass gathers twice, scatters once.

    The embedding and the last norm stay gathered between a pass's forward and backward.
    """
    in_layers = MODEL.num_layers * (12 * MODEL.hidden_size**2 + 13 * MODEL.hidden_size)
    once = 4 * (whole * parameter_count(MODEL) + layers * in_layers)
    for sent in run_forked(sent_by, 2, parallel, (2, 4)):
        assert sent == [once / 2, once if parallel.shard_parameters else once / 2]


def sent_by(parallel: ParallelConfig, batches: tuple[int, ...]) -> list[float]:
    return [traffic.iteration(MODEL, parallel, batch).sent for batch in batches]


def test_a_divided_model_of_hugging_face_is_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {
        "num_layers": 2,
        "hidden_size": 32,
        "vocab_size": 50,
        "padded_vocab_size": 128,
        "seq_length": 32,
    }
    monkeypatch.setattr(huggingface, "SHAPE", huggingface.SHAPE.model_copy(update=shape))
    monkeypatch.setattr(huggingface, "WIDTHS", (1, 2))
    monkeypatch.setattr(huggingface, "TOKENS", 8)
    monkeypatch.setattr(huggingface, "NEW_TOKENS", 4)
    monkeypatch.setattr(huggingface, "collectives_per_layer", lambda: 4.0)
    values = {line["quantity"]: line["value"] for line in huggingface.measure_huggingface()}
    assert values["largest_logit_difference"] < 1e-5
    assert values["identical_generations_percent"] == values["identical_files_percent"] == 100


def test_an_experiment_that_measures_seals_scaled_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    line = {
        "series": "optimizer states",
        "quantity": "communication_ratio",
        "kind": "scaled",
        "value": 1.5,
    }
    monkeypatch.setattr(runner, "measure", lambda name, limit: [line])
    experiment = find_experiment("zero/communication")
    for _ in range(2):
        run_named([experiment], tmp_path)
    (directory,) = (path for path in tmp_path.glob("*-measured-*") if not path.is_symlink())
    (record,) = read_records(directory / "records.jsonl")
    assert (record.experiment, record.source) == ("zero/communication", directory.name)
    outcomes = {one.claim.id: one.outcome for one in judge([experiment], load_results([tmp_path]))}
    assert outcomes["zero/communication/os"] == "not-tried"
    assert "measured on this machine" in capfd.readouterr().out


def test_what_takes_long_is_left_out_of_several_but_not_its_simulation(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    slow = find_experiment("2021/figure-12").model_copy(update={"measures": "released"})
    run_named([slow, find_experiment("2021/gains")], tmp_path)
    said = capfd.readouterr().out
    assert "2021/figure-12: 10 numbers simulated or computed" in said
    assert (
        "2021/figure-12: left out; `mlm-experiment run 2021/figure-12` scores released weights"
        in said
    )


def outcomes(name: str, lines: list[Line], folder: Path) -> dict[str, str]:
    """What becomes of the experiment's claims by these measured numbers; those without one are left
    out."""
    note = {"kind": "measured", "note": ""}
    seal_numbers(find_experiment(name), "-planted", [note | line for line in lines], folder)
    return {
        one.claim.id: one.outcome
        for one in judge([find_experiment(name)], load_results([folder]))
        if one.record
    }


def test_sequence_parallelism_and_interleaving_send_what_the_papers_say(tmp_path: Path) -> None:
    found = outcomes(
        "2021/communication", [*traffic._sequence(), *traffic._interleaved()], tmp_path
    )
    assert len(found) == 7
    assert set(found.values()) == {"confirmed"}


def test_recomputation_adds_one_all_reduce_a_layer() -> None:
    """Of the forward pass's two: recomputation ends when the backward pass has all it needs, before
    the MLP's."""
    _, whole = run_forked(traffic.of_layer, 2, ParallelConfig(tp=2, recompute="full"))[0]
    assert whole.calls.total() == 5


def test_a_wrong_count_of_collectives_turns_its_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "WIDTHS", (2,))
    right = outcomes("2021/communication", traffic._tensor(), tmp_path / "right")
    assert set(right.values()) == {"confirmed"}
    leave = layers.leave_tensor_parallel
    monkeypatch.setattr(
        layers,
        "leave_tensor_parallel",
        lambda x, axis, divided: leave(leave(x, axis, divided), axis, divided),
    )
    wrong = outcomes("2021/communication", traffic._tensor(), tmp_path / "wrong")
    assert wrong == right | dict.fromkeys(right, "contradicted") | {
        name: "confirmed" for name in right if name.endswith("/backward")
    }


def test_what_a_layer_keeps_is_table_2_of_the_2022_paper() -> None:
    scores = 80
    (none, selective, full, ours) = activations.bytes_per_sbh("GPT-3", False)
    assert [none, selective, full] == pytest.approx([34 + scores, 34, 2], rel=0.005)
    assert 30 < ours < 34, "this engine makes scores and masks again"
    for divided in run_forked(activations.bytes_per_sbh, 2, "GPT-3", True):
        assert divided[:3] == pytest.approx([(34 + scores) / 2, 34 / 2, 2 / 2], rel=0.005)
        assert divided[3] == pytest.approx(ours / 2, rel=0.005)


def test_a_partition_keeps_its_inputs_and_the_layers_that_it_computes_again() -> None:
    plain, microbatches, layers = memory.LAYOUTS["no parallelism"], 4, 2
    ((size_in, size_all),) = run_forked(memory.layer_bytes, 1, plain)
    for at_once, nothing in run_forked(
        memory.peaks, 2, 2, plain, layers, (layers, 0), (microbatches,), microbatches
    ):
        assert at_once == (microbatches - 1) * size_in + layers * size_all
        assert nothing == microbatches * layers * size_all


def test_products_that_are_made_again_are_counted() -> None:
    """Selective recomputation repeats 4Bs²h, a third of what the 2022 paper's Equation 8 adds."""
    values = {
        (one["series"], one["quantity"]): one["value"] for one in activations._flops("MT-NLG")
    }
    assert values["MT-NLG", "model_flops_coefficient"] == pytest.approx(72)
    assert values["MT-NLG", "recomputed_flops_coefficient"] == pytest.approx(96)
    s, _, h, _ = activations.SHAPES["MT-NLG"]
    assert values["MT-NLG", "selective_flops_overhead_percent"] == pytest.approx(
        100 * 4 * s / (72 * h + 12 * s)
    )


def test_words_and_sub_words_of_the_published_file_are_counted(
    published: Path, tmp_path: Path
) -> None:
    run_named([find_experiment("2019/words")], tmp_path)
    found = judge([find_experiment("2019/words")], load_results([tmp_path]))
    assert [one.outcome for one in found] == ["confirmed", "confirmed", "confirmed"]


def test_multiples_in_the_text_follow_from_the_printed_sizes_by_their_rounding(
    tmp_path: Path,
) -> None:
    multiples = find_experiment("2019/multiples")
    run_named([multiples], tmp_path)
    verdicts = {one.claim.id: one for one in judge([multiples], load_results([tmp_path]))}
    assert {one.outcome for one in verdicts.values()} == {"confirmed"}
    of_gpt_2 = verdicts["2019/blog/gpt-2-multiple"]
    assert of_gpt_2.record is not None
    assert of_gpt_2.record.value == pytest.approx(8.3 / 1.5)
    assert "5.323 to 5.759 by the printed digits" in of_gpt_2.reason


def test_files_that_are_not_here_leave_one_experiment_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def missing(experiment: Any, limit: int | None) -> Any:
        raise DataMissing("put the file there and name it in MLM_DATA_DIR")

    monkeypatch.setattr(runner, "measure", missing)
    words = find_experiment("2019/words")
    with pytest.raises(DataMissing):
        run_named([words], tmp_path)
    run_named([words, words], tmp_path)
    assert "2019/words: left out; put the file there" in capfd.readouterr().out


def test_released_models_answer_claims_by_protocols_that_there_are() -> None:
    for name, models in MODELS.items():
        claimed = {(claim.series, claim.quantity) for claim in find_experiment(name).claims}
        for series, quantities in (pair for model in models.values() for pair in model.items()):
            assert {(series, quantity) for quantity in quantities} <= claimed
            for protocol, field, factor in quantities.values():
                assert protocol in {*TASKS, "wikitext103-valid"}
                assert field in {*PerplexityResult.model_fields, *ClozeResult.model_fields}
                assert factor in (1, 100)
