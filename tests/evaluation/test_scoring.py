"""Scores are exact and do not depend on how they are computed."""

import math
import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.torch_names import onednn
from mlm_repro.evaluation.protocol import Request, Scores
from mlm_repro.evaluation.scoring.scores import (
    TOGETHER,
    ScoringModel,
    pack_weights,
    score,
    sum_exponentials,
)
from mlm_repro.lineage.errors import BadInput, UserError
from tests.evaluation.standins import Bigram, scoring_model, tiny_config, tiny_gpt2

CONFIG = tiny_config()


@pytest.fixture(scope="module")
def model() -> ScoringModel:
    return scoring_model(tiny_gpt2(CONFIG), CONFIG.vocab_size)


def random_requests(count: int, seed: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(count):
        length = int(rng.integers(2, CONFIG.seq_length + 2))
        tokens = rng.integers(0, CONFIG.vocab_size, length)
        requests.append(Request(tokens, int(rng.integers(1, length))))
    return requests


def one_at_a_time(requests: Sequence[Request], banned: Sequence[int] = ()) -> Scores:
    """Full logits, float64 softmax, no batch: what the scores should be."""
    network = tiny_gpt2(CONFIG)
    log_probabilities, greedy, allowed, counts = [], [], [], []
    with torch.no_grad():
        for request in requests:
            tokens = torch.from_numpy(request.tokens)
            logits = network.logits(network(tokens[None, :-1]))[:, 0, : CONFIG.vocab_size].double()
            targets = tokens[1:]
            losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
            log_probabilities.append(-losses[-request.num_scored :].numpy())
            greedy.append((logits.argmax(1) == targets)[-request.num_scored :].numpy())
            logits[:, list(banned)] = float("-inf")
            allowed.append((logits.argmax(1) == targets)[-request.num_scored :].numpy())
            counts.append(request.num_scored)
    best = np.concatenate(greedy)
    return Scores(
        np.concatenate(log_probabilities), best, np.concatenate(allowed), np.array(counts)
    )


@pytest.mark.parametrize("batch_size", [1, 3, 16, None])
def test_scores_are_those_of_a_plain_loop_for_any_batch_size(
    model: ScoringModel, batch_size: int | None
) -> None:
    requests = random_requests(40)
    expected, found = one_at_a_time(requests), score(model, requests, batch_size, workers=1)
    np.testing.assert_allclose(found.nll, expected.nll, rtol=1e-6)
    np.testing.assert_allclose(
        found.log_probabilities, expected.log_probabilities, rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(found.greedy, expected.greedy)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_packed_weights_give_the_same_scores_and_have_no_gradient(
    dtype: torch.dtype, tolerance: float
) -> None:
    requests, network = random_requests(20), tiny_gpt2(CONFIG).to(dtype)
    expected = score(scoring_model(network, CONFIG.vocab_size), requests, workers=1)
    pack_weights(network)
    np.testing.assert_allclose(
        score(scoring_model(network, CONFIG.vocab_size), requests, workers=2).nll,
        expected.nll,
        rtol=tolerance,
    )
    if onednn:
        packed = {
            name.rsplit(".", 2)[1] for name, each in network.named_parameters() if each.is_mkldnn
        }
        assert packed == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
        assert not any(each.requires_grad for each in network.parameters() if each.is_mkldnn)


@pytest.mark.parametrize("workers", [2, 3, 50])
def test_the_number_of_workers_changes_no_bit(model: ScoringModel, workers: int) -> None:
    requests = random_requests(23)
    alone, together = (
        score(model, requests, 4, workers=1),
        score(model, requests, 4, workers=workers),
    )
    np.testing.assert_array_equal(alone.nll, together.nll)
    np.testing.assert_array_equal(alone.greedy, together.greedy)


@pytest.mark.parametrize("workers", [1, 2])
def test_every_worker_has_one_thread_and_the_caller_keeps_its_own(workers: int) -> None:
    class Telling(Bigram):
        def logits(self, hidden: Tensor) -> Tensor:
            return hidden @ self.table * torch.get_num_threads()

    model = scoring_model(Telling(torch.tensor([[0.0, 1.0], [0.0, 0.0]])), 2)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        scores = score(model, [Request(np.array([0, 1]), 1)] * 2, 1, workers)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert scores.nll == pytest.approx([math.log(1 + math.exp(-1))] * 2)


def test_all_progress_is_reported(model: ScoringModel) -> None:
    for workers in (1, 2):
        counts: list[int] = []
        score(model, random_requests(10), 4, workers, counts.append)
        assert sorted(counts) == [2, 4, 4]


@pytest.mark.parametrize("padding", [0.0, 50.0, 1e30, float("nan")])
def test_padded_columns_have_no_part_in_the_softmax_or_the_argmax(padding: float) -> None:
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
    requests = [
        Request(np.array([0, 1, 4, 2, 3]), 4),
        Request(np.array([3, int(table[3].argmax())]), 1),
    ]
    bare = score(scoring_model(Bigram(table), 5), requests, workers=1)
    padded = score(
        scoring_model(Bigram(torch.cat([table, torch.full((5, 3), padding)], 1)), 5),
        requests,
        workers=1,
    )
    np.testing.assert_array_equal(bare.nll, padded.nll)
    np.testing.assert_array_equal(bare.greedy, padded.greedy)
    assert bare.greedy[-1]


def test_scored_rows_go_through_the_output_layer_in_parts(
    model: ScoringModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = random_requests(12)
    whole = score(model, requests, 4, workers=1)
    monkeypatch.setattr(ScoringModel, "rows_per_head", lambda self: 3)
    np.testing.assert_allclose(score(model, requests, 4, workers=1).nll, whole.nll, rtol=1e-6)


def test_the_last_layer_computes_only_scored_rows_and_the_others_all() -> None:
    network = tiny_gpt2(CONFIG)
    rows: dict[str, int] = {}
    for number, layer in network.layers.items():
        layer.mlp.register_forward_hook(
            lambda module, inputs, output, number=number: rows.update(
                {number: output[..., 0].numel()}
            )
        )
    requests = [Request(np.arange(20), 3), Request(np.arange(15), 2)]
    found = score(scoring_model(network, CONFIG.vocab_size), requests, workers=1)
    assert rows == {"0": 2 * 19, "1": 2 * 3}
    np.testing.assert_allclose(found.nll, one_at_a_time(requests).nll, rtol=1e-6)


def test_of_equal_logits_the_first_is_the_most_likely() -> None:
    table = torch.tensor(
        [[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 9.0]]
    )
    pairs = {(0, 1): True, (0, 2): False, (1, 0): True, (1, 1): False, (2, 3): False, (3, 3): True}
    requests = [Request(np.array(pair), 1) for pair in pairs]
    assert score(scoring_model(Bigram(table), 4), requests, 4, workers=1).greedy.tolist() == list(
        pairs.values()
    )


@pytest.mark.parametrize("batch_size", [1, 7])
def test_banned_tokens_are_no_answer_but_keep_their_probability(
    model: ScoringModel, batch_size: int
) -> None:
    requests, banned = random_requests(40), np.arange(0, CONFIG.vocab_size, 3)
    found = score(model, requests, batch_size, workers=1, banned=banned)
    np.testing.assert_array_equal(
        found.greedy_allowed, one_at_a_time(requests, banned).greedy_allowed
    )
    assert (found.greedy_allowed != found.greedy).any()
    plain = score(model, requests, batch_size, workers=1)
    np.testing.assert_array_equal(found.log_probabilities, plain.log_probabilities)
    np.testing.assert_array_equal(found.greedy, plain.greedy)
    np.testing.assert_array_equal(plain.greedy_allowed, plain.greedy)


def test_nothing_to_score_and_negative_tokens_are_refused(model: ScoringModel) -> None:
    with pytest.raises(BadInput, match="nothing to score"):
        score(model, [])
    with pytest.raises(BadInput, match="vocabulary"):
        score(model, [Request(np.array([-1, 2]), 1)])


def test_what_does_not_fit_the_model_is_refused(model: ScoringModel) -> None:
    with pytest.raises(BadInput, match="are more than the 32 that the model takes at once"):
        score(model, [Request(np.zeros(CONFIG.seq_length + 2, dtype=np.int64), 1)])
    with pytest.raises(BadInput, match="vocabulary"):
        score(model, [Request(np.array([1, CONFIG.vocab_size]), 1)])
    on_gpu = ScoringModel(model.network, 61, 32, 32, torch.float32, serial_mesh("cuda"))
    with pytest.raises(BadInput, match="GPU"):
        score(on_gpu, random_requests(2), workers=2)


@pytest.mark.parametrize("num_scored", [0, 3, 4])
def test_a_request_must_leave_something_to_predict_from(num_scored: int) -> None:
    with pytest.raises(BadInput, match="tokens of a window or passage are to be scored"):
        Request(np.array([1, 2, 3]), num_scored)


def test_a_worker_that_dies_is_noticed() -> None:
    class Dying(Bigram):
        def hidden_states_at(self, tokens: Tensor, positions: Tensor) -> Tensor:
            os._exit(9)

    requests = [Request(np.array([0, 1]), 1)] * 4
    with pytest.raises(UserError, match="a scoring worker ended"):
        score(scoring_model(Dying(torch.zeros(2, 2)), 2), requests, 1, workers=2)


WIDTHS = st.sampled_from([1, 2, TOGETHER - 1, TOGETHER, TOGETHER + 1, 3 * TOGETHER + 7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@given(
    st.integers(1, 5),
    st.integers(0, 9),
    WIDTHS,
    st.integers(0, 9),
    st.floats(0.01, 100),
    st.integers(0, 2**31),
)
def test_the_columns_and_no_others_are_added_up(
    dtype: torch.dtype, rows: int, before: int, width: int, after: int, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = (torch.randn(rows, before + width + after) * scale).to(dtype)
    highest, total = sum_exponentials(logits, slice(before, before + width))
    some = logits[:, before : before + width].float()
    assert torch.equal(highest, some.amax(dim=1))
    torch.testing.assert_close(
        total, (some.double() - highest.double()[:, None]).exp().sum(dim=1), rtol=1e-6, atol=0
    )


def test_no_columns_are_nothing() -> None:
    highest, total = sum_exponentials(torch.randn(2, 5), slice(3, 3))
    assert highest.tolist() == [-math.inf] * 2
    assert total.tolist() == [0.0] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_none_is_not_hidden(value: float) -> None:
    logits = torch.randn(2, 3000)
    logits[1, 2500] = value
    _, total = sum_exponentials(logits, slice(0, 3000))
    assert total.isnan().tolist() == [False, True]
