"""`python -m benchmarks train` at toy size: all contenders compute the same, and ratios are of
measured times."""

import pytest

from benchmarks import train
from benchmarks.contenders import Timed, TrainingSize
from benchmarks.kernels import KernelShape
from benchmarks.train import LAYOUT_CASE, OURS, SEPARATE, STOCK, TUNED, Row, read_size
from mlm_repro.engine.config import Precision
from mlm_repro.engine.costs import flops_per_token
from mlm_repro.engine.kernels.registry import KERNELS

SMALL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "seq_length": 32,
    "padded_vocab_size": 256,
}


def small_size(name: str = "tiny", precision: Precision = "fp32") -> TrainingSize:
    model = read_size("tiny").model.model_copy(update=SMALL | {"vocab_size": 256})
    return train.size_of(model, 4, precision, iterations=3, warm_up=1)


def measured(seconds: float, peak: int = 100) -> Timed:
    return Timed([seconds, seconds, 100 * seconds], [1.0, 1.0], peak)


def test_all_contenders_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "read_size", small_size)
    monkeypatch.setattr(train, "KERNEL_SHAPE", KernelShape(s=8, b=1, n=2, d=4, v=16))
    monkeypatch.setattr("benchmarks.train.GEMM_WIDTH", 64)
    monkeypatch.setattr("torch.compile", lambda function: function)
    names = ["tiny fp32 dropout 0", "tiny bf16 dropout 0", LAYOUT_CASE, "kernels"]
    result = train.measure(1, names)
    assert result.disagreements == []
    in_fp32, in_bf16, two_processes, *kernels = result.cases
    assert list(in_fp32.losses) == list(in_bf16.losses) == [OURS, STOCK, TUNED]
    assert all(len(losses) == 3 for case in (in_fp32, in_bf16) for losses in case.losses.values())
    assert list(two_processes.losses) == [OURS, "tp2", "pp2", "dp2", SEPARATE]
    assert all(each.value > 0 for case in result.cases for each in case.ratios)
    compared = {case.name.rpartition(" ")[0]: case.ratios[0].name for case in kernels}
    assert {*compared} == {name for name, places in KERNELS.items() if "cpu" in places} - {
        "dropout_bits"
    }
    assert {*compared.values()} == {"reference ÷ ours"}


def test_a_row_holds_ratios_goals_and_whether_they_are_reached() -> None:
    size = read_size("tiny")
    row = Row("tiny", "fp32", 0.0, to_stock=2.0, to_limit=0.5, memory_to_stock=0.5)
    flops = flops_per_token(size.model, causal=True) * size.tokens
    rounds = {OURS: [measured(1.0)], STOCK: [measured(3.0, peak=150)], TUNED: [measured(0.5)]}
    case = train.summarize(row, size, rounds, [2 * flops / 1e9])
    assert [each.value for each in case.ratios] == [3.0, 0.5, 0.5, 0.666667]
    assert [each.goal for each in case.ratios] == [2.0, None, 0.5, 0.5]


def test_two_processes_are_held_beside_one_and_beside_two_separate_ones() -> None:
    seconds = {OURS: 2.0, "tp2": 1.0, "pp2": 4.0, "dp2": 1.25, SEPARATE: 2.0}
    case = train.summarize_layouts(
        small_size(), {name: [measured(s)] for name, s in seconds.items()}
    )
    tp2, dp2, pp2, separate = (each.value for each in case.ratios)
    assert (tp2, dp2, separate) == (2.0, 1.6, 2.0)
    # A layer has 12·32² + 32·32 operations a token, the head 256·32; two layers on two stages.
    ideal = (2 * 13 * 32**2 + 256 * 32) / (13 * 32**2 + 256 * 32)
    assert pp2 == pytest.approx(0.5 / ideal, rel=1e-5)
