"""`mlm-bench eval`: who is compared scores the same requests to the same answers, and what is reported was measured."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import ModelConfig
from evaluation.protocol import Request
from experiments.bench.benchmarks.eval import (
    GPT2,
    OURS,
    SMALL,
    Comparison,
    compare,
    compare_generation,
    has_harness,
    measure_memory,
    peak_bytes,
    sizes,
    sliding_requests,
)
from experiments.bench.contenders.scorers import (
    Answer,
    export_model,
    harness,
    initial_network,
    our_model,
    ours,
    plain_loop,
    transformers_loop,
    transformers_model,
)
from tests.commands import call
from tests.evaluation.standins import write_dataset

CONFIG = ModelConfig(
    num_layers=2, hidden_size=32, num_heads=4, seq_length=64, vocab_size=300, padded_vocab_size=320, init_std=0.3
)
COMPARISON = Comparison("stride 32", "plain loop", "tiny", 1.0, sliding_requests(CONFIG, 5), (1, 2))


def answers_of(*nll: float, greedy: Sequence[bool] | None = None) -> Answer:
    return Answer(np.array(nll), np.array(greedy or [True] * len(nll)))


def test_the_sizes_are_those_of_the_goals() -> None:
    assert (sizes()[SMALL].num_layers, sizes()[SMALL].hidden_size) == (2, 128)
    assert (sizes()[GPT2].num_layers, sizes()[GPT2].hidden_size, sizes()[GPT2].num_heads) == (12, 768, 12)
    assert {(config.seq_length, config.vocab_size) for config in sizes().values()} == {(1024, 50257)}


def test_the_plain_loop_gives_our_answers() -> None:
    case, differing = compare(COMPARISON, ours(our_model(CONFIG)), plain_loop(initial_network(CONFIG)), rounds=2)
    assert differing == []
    assert case.setting["largest_relative_gap"] < 1e-6
    assert case.setting["different_verdicts"] == 0
    assert {one.contender: len(one.samples) for one in case.series} == {OURS: 2, COMPARISON.rival: 2}
    assert case.setting["batch_size"] in COMPARISON.batch_sizes
    assert [case.setting[name] for name in ("requests", "scored", "inputs")] == [5, 160, 320]


def test_the_plain_loop_gives_our_answers_in_bf16() -> None:
    rivals = ours(our_model(CONFIG, torch.bfloat16)), plain_loop(initial_network(CONFIG, torch.bfloat16))
    case, differing = compare(replace(COMPARISON, precision="bf16"), *rivals, rounds=1)
    assert differing == []
    assert "tiny bf16" in case.name


@pytest.mark.skipif(not has_harness(), reason="lm-evaluation-harness or accelerate is not installed")
def test_transformers_gives_our_answers(tmp_path: Path) -> None:
    from data_pipeline.tokens.tokenizer import Tokenizer

    write_dataset(tmp_path / "words")
    tokenizer = Tokenizer.load(tmp_path / "words" / "tokenizer")
    theirs = transformers_model(export_model(initial_network(CONFIG), tokenizer, tmp_path))
    case, differing = compare(COMPARISON, ours(our_model(CONFIG)), transformers_loop(theirs), rounds=1)
    assert differing == []
    assert case.setting["largest_relative_gap"] < 1e-5


def test_other_continuations_are_counted() -> None:
    def says(*tokens: int) -> object:
        return lambda prompts, new: [[token] * new for token, _ in zip(tokens, prompts, strict=True)]

    for theirs, sentences in ((says(1, 2), 0), (says(1, 3), 1)):
        case, differing = compare_generation(says(1, 2), theirs, batch=2, rounds=1)  # type: ignore[arg-type]
        assert len(differing) == sentences
        assert {one.contender for one in case.series} == {OURS, "transformers"}


@pytest.mark.skipif(not has_harness(), reason="lm-evaluation-harness or accelerate is not installed")
def test_the_harness_gives_our_answers(tmp_path: Path) -> None:
    from data_pipeline.tokens.tokenizer import Tokenizer

    write_dataset(tmp_path / "words")
    tokenizer = Tokenizer.load(tmp_path / "words" / "tokenizer")
    directory = export_model(initial_network(CONFIG), tokenizer, tmp_path)
    rng = np.random.default_rng(3)
    requests = [Request(rng.integers(0, 299, length), scored) for length, scored in ((65, 64), (30, 2), (9, 8), (2, 1))]
    comparison = Comparison("some", "lm-evaluation-harness", "tiny", 1.0, requests, (1, 4))
    case, differing = compare(comparison, ours(our_model(CONFIG)), harness(directory, CONFIG.seq_length), rounds=1)
    assert differing == []
    assert case.setting["largest_relative_gap"] < 1e-5


def test_another_answer_is_named() -> None:
    comparison = Comparison("c", "rival", "tiny", 1.0, COMPARISON.requests[:2], (1,))
    for theirs, found in (
        (answers_of(1.0, 2.0), False),
        (answers_of(1.0, 2.001), True),
        (answers_of(1.0, float("nan")), True),
        (answers_of(1.0, 2.0, greedy=[True, False]), True),
    ):
        _, differing = compare(comparison, lambda *_: answers_of(1.0, 2.0), lambda *_, a=theirs: a, rounds=1)
        assert bool(differing) is found


def test_the_rival_has_its_fastest_batch_size_and_ratios_are_taken_within_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = 0.0
    ours_take, theirs_take = iter([1.0, 1.0, 2.0, 4.0]), iter([9.0, 3.0, 6.0, 4.0, 40.0])
    asked: list[int | None] = []

    def taking(times: object, sizes: list[int | None]) -> object:
        def run(requests: Sequence[Request], size: int | None) -> Answer:
            nonlocal clock
            clock += next(times)  # type: ignore[call-overload]
            sizes.append(size)
            return answers_of(1.0)

        return run

    monkeypatch.setattr("time.process_time", lambda: clock)
    case, _ = compare(COMPARISON, taking(ours_take, []), taking(theirs_take, asked), rounds=3)  # type: ignore[arg-type]
    assert asked == [1, 2, 2, 2, 2]
    assert case.ratios[0].value == 6.0  # of 6, 2 and 10
    assert [one.samples for one in case.series] == [[1.0, 2.0, 4.0], [6.0, 4.0, 40.0]]


def test_peak_memory_is_that_of_the_work_alone() -> None:
    def make(megabytes: int) -> object:
        kept = torch.ones(64, 2**18)  # 64 MiB before the work begins

        def work() -> float:
            return float(torch.ones(megabytes, 2**18).sum() + kept[0, 0])

        return work

    found = peak_bytes(lambda: make(128))  # type: ignore[arg-type, return-value]
    assert 127 < found / 2**20 < 150


def test_the_memory_measured_is_shared_by_size_and_batch() -> None:
    config = CONFIG.model_copy(update={"vocab_size": 50000, "padded_vocab_size": 50048, "seq_length": 256})
    found = measure_memory("some", config, 4)
    peaks = {one.contender: one.samples[0] for one in found.series}
    assert peaks["plain loop"] > 4 * 256 * 50000 * 4
    assert found.ratios[0].value == pytest.approx(peaks["ours"] / peaks["plain loop"], abs=1e-4)
    assert found.ratios[0].is_reached == (found.ratios[0].value <= 0.25)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [(["--rounds", "0"], 2, "--rounds"), (["--json", "."], 2, "is a directory"), ([], 5, "MLM_DATA_DIR")],
)
def test_nothing_is_measured_when_it_cannot_be(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    alone = {"MLM_DATA_DIR": str(tmp_path), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = call(alone, "mlm-bench", "eval", *arguments, ends=code)
    assert words in done.err
