"""A killed evaluation goes on where it was, to the same bits; a finished one is not repeated."""

import dataclasses
import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mlm_repro.engine.kernels.identity import numerics_identity
from mlm_repro.evaluation.protocol import Request, Scores
from mlm_repro.evaluation.scoring.scores import (
    ScoringModel,
    describe,
    installed_packages,
    plan_batches,
    score,
)
from mlm_repro.evaluation.scoring.store import Store, open_scores, remove_oldest
from mlm_repro.lineage.environment import user_cache
from mlm_repro.lineage.loops import config
from tests.evaluation.standins import scoring_model, tiny_config, tiny_gpt2
from tests.evaluation.test_scoring import random_requests

CONFIG = tiny_config()
REQUESTS = random_requests(30, seed=5)
BATCH_SIZE = 4
NUM_BATCHES = 8


class Counting:
    """A tiny GPT-2 that counts its forward passes."""

    def __init__(self) -> None:
        self.model, self.passes = tiny_gpt2(CONFIG), 0
        self.logits = self.model.logits

    def hidden_states_at(self, tokens: Tensor, positions: Tensor) -> Tensor:
        self.passes += 1
        return self.model.hidden_states_at(tokens, positions)


def counting_model() -> tuple[Counting, ScoringModel]:
    network = Counting()
    return network, scoring_model(network, CONFIG.vocab_size)  # type: ignore[arg-type]


def store_in(folder: Path, checkpoint: str = "checkpoint", tokenizer: str = "tokenizer") -> Store:
    return partial(open_scores, folder, checkpoint, tokenizer)


def assert_same_bits(one: Scores, other: Scores) -> None:
    for name in ("log_probabilities", "greedy", "greedy_allowed", "num_scored"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def plain() -> Scores:
    return score(counting_model()[1], REQUESTS, BATCH_SIZE, workers=1)


def kept_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.scores"))


def test_scores_are_kept_by_what_decides_their_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = counting_model()[1]
    before, packages = describe(model), installed_packages()
    assert any(package.startswith("torch-") for package in packages)
    (tmp_path / "vendored-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    installed_packages.cache_clear()
    assert installed_packages() == packages, (
        "what a library adds to the import path changes nothing"
    )
    monkeypatch.setattr(config, "CPU_NAME", "generic")
    assert describe(model) != before
    monkeypatch.undo()
    assert describe(model) == before
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    numerics_identity.cache_clear()
    assert describe(model) != before
    numerics_identity.cache_clear()


@pytest.mark.parametrize("workers", [1, 2])
def test_after_kill_9_finished_batches_are_not_computed_again(tmp_path: Path, workers: int) -> None:
    def killed_after_three() -> None:
        done: list[int] = []

        def progress(count: int) -> None:
            done.append(count)
            if len(done) == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        score(
            counting_model()[1], REQUESTS, BATCH_SIZE, workers, progress, store=store_in(tmp_path)
        )

    process = multiprocessing.get_context("fork").Process(target=killed_after_three)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    network, model = counting_model()
    resumed: list[int] = []
    done: list[int] = []
    scores = score(
        model,
        REQUESTS,
        BATCH_SIZE,
        1,
        done.append,
        store=store_in(tmp_path),
        on_resumed=resumed.append,
    )
    assert network.passes == NUM_BATCHES - 3
    assert len(done) == NUM_BATCHES - 3
    assert resumed[0] + sum(done) == len(REQUESTS)
    assert_same_bits(scores, plain())


def test_what_changes_the_bits_is_another_evaluation(tmp_path: Path) -> None:
    def passes(
        requests: list[Request] = REQUESTS, batch_size: int = BATCH_SIZE, **changed: object
    ) -> int:
        network, model = counting_model()
        digests = {key: changed.pop(key) for key in ("checkpoint", "tokenizer") if key in changed}
        banned = changed.pop("banned", None)
        model = dataclasses.replace(model, **changed)
        score(model, requests, batch_size, 1, banned=banned, store=store_in(tmp_path, **digests))  # type: ignore[arg-type]
        return network.passes

    assert passes() == NUM_BATCHES
    assert passes() == 0
    assert passes(banned=np.array([3])) == NUM_BATCHES
    assert passes(batch_size=8) == 4
    assert passes(checkpoint="another") == NUM_BATCHES
    assert passes(tokenizer="another") == NUM_BATCHES
    assert passes(dtype=torch.bfloat16) == NUM_BATCHES
    other_token = [
        *REQUESTS[:-1],
        Request((REQUESTS[-1].tokens + 1) % CONFIG.vocab_size, REQUESTS[-1].num_scored),
    ]
    assert passes(other_token) == NUM_BATCHES
    assert passes() == 0


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), is_torn=st.booleans())
def test_a_torn_or_changed_file_never_changes_a_result(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, is_torn: bool
) -> None:
    folder = tmp_path_factory.mktemp("scores")
    expected = score(counting_model()[1], REQUESTS, BATCH_SIZE, 1, store=store_in(folder))
    (path,) = kept_files(folder)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if is_torn:
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    network, model = counting_model()
    assert_same_bits(score(model, REQUESTS, BATCH_SIZE, 1, store=store_in(folder)), expected)
    assert 1 <= network.passes <= NUM_BATCHES


def test_a_folder_that_cannot_be_written_keeps_nothing_and_hinders_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    scores = score(
        counting_model()[1], REQUESTS, BATCH_SIZE, 1, store=store_in(tmp_path / "file" / "below")
    )
    assert_same_bits(scores, plain())


def test_beyond_a_size_what_was_used_longest_ago_goes(tmp_path: Path) -> None:
    for age, name in enumerate(("newest", "middle", "oldest")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.scores").write_bytes(bytes(1000))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    remove_oldest(tmp_path, 3000)
    assert len(list(tmp_path.iterdir())) == 3
    remove_oldest(tmp_path, 2999)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["middle", "newest"]
    remove_oldest(tmp_path, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["newest"]


def test_the_folder_is_the_user_s_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache("scores") == tmp_path / "mlm-repro" / "scores"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache("scores") == tmp_path / ".cache" / "mlm-repro" / "scores"


@given(
    lengths=st.lists(st.tuples(st.integers(2, 50), st.integers(1, 49)), min_size=1, max_size=40),
    budget=st.integers(1, 200),
)
def test_batches_hold_every_request_once_and_stay_within_the_budget(
    lengths: list[tuple[int, int]], budget: int
) -> None:
    requests = [
        Request(np.zeros(length, dtype=np.int64), min(scored, length - 1))
        for length, scored in lengths
    ]
    batches = plan_batches(requests, lambda width: max(1, budget // width))
    assert sorted(index for batch in batches for index in batch) == list(range(len(requests)))
    widths = [[len(requests[index].tokens) - 1 for index in batch] for batch in batches]
    assert all(len(batch) == 1 or len(batch) * max(batch) <= budget for batch in widths)
    flat = [width for batch in widths for width in batch]
    assert flat == sorted(flat, reverse=True)


def test_scores_of_another_evaluation_or_of_another_user_are_not_trusted(tmp_path: Path) -> None:
    def passes(checkpoint: str) -> int:
        network, model = counting_model()
        score(model, REQUESTS, BATCH_SIZE, 1, store=store_in(tmp_path, checkpoint))
        return network.passes

    assert passes("one") == NUM_BATCHES
    (file,) = kept_files(tmp_path)
    assert passes("other") == NUM_BATCHES
    (other,) = set(kept_files(tmp_path)) - {file}
    content, aside = other.read_bytes(), tmp_path / "aside"
    aside.write_bytes(content)

    def passes_with(change: Callable[[], object]) -> int:
        for each in kept_files(other.parent):
            each.unlink()
        change()
        return passes("other")

    assert passes_with(lambda: other.write_bytes(content)) == 0
    assert passes_with(lambda: other.write_bytes(file.read_bytes())) == NUM_BATCHES
    assert passes_with(lambda: other.symlink_to(aside)) == NUM_BATCHES
    assert passes_with(lambda: (other.write_bytes(content), other.chmod(0o666))) == NUM_BATCHES
