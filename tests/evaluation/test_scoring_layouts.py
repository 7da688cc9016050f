"""Scores on tensor-, pipeline- and data-parallel ranks are those of one rank, from checkpoints of
any layout."""

import json
from pathlib import Path

import numpy as np
import pytest

from mlm_repro.engine.checkpoint.checkpoint import TrainingState, save_checkpoint
from mlm_repro.engine.config import DataSection, ParallelConfig, RunConfig
from mlm_repro.engine.launch.mesh import build_mesh
from mlm_repro.engine.launch.threads import run_threads
from mlm_repro.engine.optim.adam import FlatAdamW
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.pipeline.executor import partition
from mlm_repro.evaluation.checkpoints import load_checkpoint
from mlm_repro.evaluation.protocol import Scores
from mlm_repro.evaluation.scoring.scores import score
from mlm_repro.evaluation.settings import Settings
from mlm_repro.lineage.config import override_config
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.run import RunDirectory
from tests.commands import call
from tests.evaluation.standins import tiny_config, write_dataset
from tests.evaluation.test_scoring import random_requests

REQUESTS = random_requests(21, seed=3)
BATCH_SIZE = 4
BANNED = np.array([0, 5, 40, 60])
WRITTEN_AT = Layout(tp=2, pp=2)


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose checkpoint four ranks have written, tp 2 × pp 2."""
    root = tmp_path_factory.mktemp("divided")
    write_dataset(root / "words")
    # A rank of tp 2 is all padding.
    model = tiny_config(vocab_size=300).model_copy(update={"padded_vocab_size": 640})
    config = RunConfig(
        name="tiny",
        model=model,
        data=DataSection(dataset=root / "words"),
        parallel=ParallelConfig(tp=2, pp=2),
    )
    run = RunDirectory.begin(
        root, config.name, "training", config.model_dump(mode="json"), {"dataset": "d"}
    )
    run_threads(write_part, WRITTEN_AT.world_size, run.path, config, root / "words" / "tokenizer")
    return run.path


def write_part(run: Path, config: RunConfig, tokenizer: Path) -> None:
    import torch

    mesh = build_mesh(WRITTEN_AT)
    model = partition(config.model, config.parallel, mesh, torch.float32, config.train.seed)
    optimizer = FlatAdamW(model.parameters, config.train, mesh)
    save_checkpoint(
        run, config, TrainingState(iteration=10), model.parameters, optimizer, mesh, tokenizer
    )


def score_on(layout: Layout, run: Path, keeps: bool = False) -> tuple[Scores, int]:
    """What one rank gets, and how many of the batches were computed on it."""
    batches: list[int] = []
    evaluated = load_checkpoint(run, build_mesh(layout))
    scores = score(
        evaluated.model,
        REQUESTS,
        BATCH_SIZE,
        1,
        batches.append,
        BANNED,
        evaluated.store if keeps else None,
    )
    return scores, len(batches)


@pytest.fixture(scope="module")
def serial(divided: Path) -> Scores:
    return score_on(Layout(), divided)[0]


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2)], ids=str)
def test_a_divided_model_scores_like_the_whole_one(
    divided: Path, serial: Scores, layout: Layout
) -> None:
    answers = run_threads(score_on, layout.world_size, layout, divided)
    for scores, _ in answers:
        np.testing.assert_allclose(scores.nll, serial.nll, rtol=1e-6)
        np.testing.assert_allclose(scores.log_probabilities, serial.log_probabilities, rtol=1e-5)
        np.testing.assert_array_equal(scores.greedy, serial.greedy)
        np.testing.assert_array_equal(scores.greedy_allowed, serial.greedy_allowed)
        np.testing.assert_array_equal(scores.log_probabilities, answers[0][0].log_probabilities)


@pytest.mark.parametrize("dp", [2, 3])
def test_the_number_of_data_parallel_ranks_changes_no_bit(
    divided: Path, serial: Scores, dp: int
) -> None:
    answers = run_threads(score_on, dp, Layout(dp=dp), divided)
    assert [count for _, count in answers] == [6 // dp] * dp
    for scores, _ in answers:
        np.testing.assert_array_equal(scores.log_probabilities, serial.log_probabilities)
        np.testing.assert_array_equal(scores.greedy, serial.greedy)
        np.testing.assert_array_equal(scores.greedy_allowed, serial.greedy_allowed)


def test_ranks_keep_their_scores_and_find_them(
    divided: Path, serial: Scores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    layout = Layout(pp=2, dp=2)
    first = run_threads(score_on, 4, layout, divided, True)
    assert all(count > 0 for _, count in first)
    for scores, count in run_threads(score_on, 4, layout, divided, True):
        assert count == 0
        np.testing.assert_array_equal(scores.log_probabilities, serial.log_probabilities)
    alone, count = score_on(Layout(), divided, True)
    assert count == 0
    np.testing.assert_array_equal(alone.log_probabilities, serial.log_probabilities)


def test_a_layout_that_does_not_divide_the_model_is_refused(divided: Path) -> None:
    def refusal(layout: Layout) -> str:
        with pytest.raises(BadInput) as refused:
            load_checkpoint(divided, build_mesh(layout))
        return str(refused.value)

    assert (
        "tp = 3 does not divide the 4 attention heads" in run_threads(refusal, 3, Layout(tp=3))[0]
    )
    assert "makes 3 pipeline stages" in run_threads(refusal, 3, Layout(pp=3))[0]


@pytest.mark.parametrize(
    ("text", "layout"),
    [("tp=2,pp=2", Layout(2, 2)), ("dp=3", Layout(dp=3)), (" pp=4 , tp=1", Layout(pp=4))],
)
def test_a_layout_is_read(text: str, layout: Layout) -> None:
    assert override_config(Settings(), [f"layout={text}"]).layout == layout


@pytest.mark.parametrize(
    "text", ["", "2", "tp", "tp=0", "tp=-1", "tp=two", "cp=2", "tp=2,tp=2", "tp=2;pp=2", "tp=²"]
)
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="layout"):
        override_config(Settings(), [f"layout={text}"])


def test_the_command_starts_its_ranks_and_speaks_once(divided: Path, tmp_path: Path) -> None:
    text = tmp_path / "passages.txt"
    text.write_text("the cat sat on a mat\nrivers slept below green hills\n" * 4)
    results = []
    for layout in ("tp=1", "pp=2"):
        target = tmp_path / f"{layout}.json"
        own = {"XDG_CACHE_HOME": str(tmp_path)}
        done = call(
            own,
            "mlm-eval",
            "cloze",
            text,
            "--ckpt",
            divided,
            "--set",
            f"layout={layout}",
            "--json",
            target,
            ends=0,
        )
        assert done.out.count("accuracy") == 1
        assert done.err.count("cost: 2 examples") == 1
        results.append(json.loads(target.read_text()))
    assert results[1]["perplexity"] == pytest.approx(results[0]["perplexity"], rel=1e-6)
    assert results[1]["num_correct"] == results[0]["num_correct"]
    refused = call({}, "mlm-eval", "cloze", text, "--ckpt", divided, "--set", "layout=tp=3", ends=2)
    assert refused.err.count("tp = 3 does not divide") == 1
