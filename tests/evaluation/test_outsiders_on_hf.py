"""The oracle's GPT-2 through transformers and through ours, and lm-evaluation-harness's windows beside ours."""

import math
from pathlib import Path

import pytest
import torch

from data_pipeline.tokens.tokenizer import Tokenizer
from evaluation.documents import RunningText
from evaluation.evaluate import Settings, evaluate
from evaluation.harness import rolling_requests
from evaluation.perplexity import UNCHANGED, PerplexityTask, sliding_stream
from evaluation.protocol import SourceText

transformers = pytest.importorskip("transformers")
pytest.importorskip("lm_eval")

CONTEXT = 32


def test_every_target_of_a_sliding_window_is_a_plain_loop_s(oracle: Path) -> None:
    text = (oracle / "texts" / "all.txt").read_bytes().decode()

    def whole(tokenizer: Tokenizer) -> PerplexityTask:
        running = RunningText.of_documents(SourceText("perplexity", "all", "digest"), [text])
        return PerplexityTask(running, sliding_stream(running, UNCHANGED, tokenizer, CONTEXT, 2), tokenizer)

    mine = evaluate(oracle / "model", {"it": lambda evaluated: whole(evaluated.tokenizer)}, Settings(workers=1)).done[
        "it"
    ]
    model = transformers.GPT2LMHeadModel.from_pretrained(oracle / "model").eval()
    tokenizer = Tokenizer.from_gpt2_files(oracle / "model" / "vocab.json", oracle / "model" / "merges.txt")
    ids, expected = torch.tensor(tokenizer.encode(text)), []
    with torch.no_grad():
        for target in range(1, len(ids)):
            start = 2 * max(0, math.ceil((target - CONTEXT) / 2))
            logits = model(ids[None, start:target]).logits[0, -1]
            expected.append(torch.log_softmax(logits.double(), 0)[ids[target]].item())
    assert mine.scores.log_probabilities.tolist() == pytest.approx(expected, rel=1e-4)


def test_rolling_windows_are_lm_evaluation_harness_s() -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    for length in (1, 7, 8, 9, 16, 17, 30):
        document = list(range(100, 100 + length))
        theirs = [make_disjoint_window(pair) for pair in get_rolling_token_windows(document, 0, 8, 1)]
        requests = rolling_requests(document, 0, 8)
        assert [(r.tokens[: -r.num_scored].tolist(), r.tokens[-r.num_scored :].tolist()) for r in requests] == theirs
