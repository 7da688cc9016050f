"""`python -m benchmarks eval` at toy size: who is compared gives the same answers, and another
answer is named."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import eval as bench
from benchmarks.eval import Answers, compare
from mlm_repro.engine.config import ModelConfig

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    seq_length=128,
    vocab_size=50257,
    padded_vocab_size=50304,
    init_std=0.3,
)


def answers_of(*nll: float, greedy: Sequence[float] = (1.0, 1.0)) -> Answers:
    return np.array([nll, greedy]).T


def test_everyone_gives_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    llama = transformers.LlamaConfig(vocab_size=50257, **shape)

    def load() -> Any:
        torch.manual_seed(1)
        return transformers.LlamaForCausalLM(llama).eval()

    monkeypatch.setattr(bench, "pretrained", lambda: {bench.LLAMA: load})
    monkeypatch.setattr(bench, "SIZES", {bench.SMALL: CONFIG, bench.GPT2_124M: CONFIG})
    for name, value in (("CONTEXT", 128), ("HALF", 64)):
        monkeypatch.setattr(bench, name, value)
    threads = torch.get_num_threads()
    result = bench.measure(rounds=2)
    torch.set_num_threads(threads)
    assert result.disagreements == []
    scored = [case for case in result.cases if case.name.startswith("stride 32")]
    assert [case.name.rpartition("beside ")[2] for case in scored] == ["plain loop"] * 3 + [
        "transformers"
    ] * 2
    assert [case.setting["different_verdicts"] for case in scored] == [0] * 5
    (memory,) = (case for case in result.cases if case.name.startswith("memory"))
    assert memory.ratios[0].value > 0
    assert all(len(each.samples) == 2 for case in scored for each in case.series)


def test_another_answer_is_named() -> None:
    requests = bench.sliding_requests(CONFIG.seq_length, 2)
    for theirs, is_wrong in (
        (answers_of(1.0, 2.0), False),
        (answers_of(1.0, 2.001), True),
        (answers_of(1.0, float("nan")), True),
        (answers_of(1.0, 2.0, greedy=(1.0, 0.0)), True),
    ):
        both = {bench.OURS: lambda *_: answers_of(1.0, 2.0), "rival": lambda *_, a=theirs: a}
        _, differing = compare("tiny", both, requests, 1.0, rounds=1)
        assert bool(differing) is is_wrong
