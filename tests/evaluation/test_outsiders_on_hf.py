"""The same Hugging Face GPT-2 through lm-evaluation-harness, through Hugging Face's own recipe and through ours."""

import importlib.util
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from data_pipeline.tokens.tokenizer import Tokenizer
from evaluation.cloze import LM_EVAL, STRICT, ClozeTask
from evaluation.documents import RunningText, lm_eval_documents
from evaluation.evaluate import Evaluation, MakeTask, Settings, evaluate
from evaluation.harness import document_stream, rolling_requests
from evaluation.perplexity import UNCHANGED, PerplexityTask, sliding_stream
from evaluation.protocol import SourceText, Task
from evaluation.schema import ClozeResult, PerplexityResult
from evaluation.wikitext103 import ROWS
from tests.made_data import NEWLINE_EXAMPLES

transformers = pytest.importorskip("transformers")
lm_eval = pytest.importorskip("lm_eval")

CONTEXT = 64
NUM_DOCUMENTS = 2
EXAMPLES = (*range(8), *NEWLINE_EXAMPLES[:2])


@pytest.fixture(scope="module")
def passages(made_data: Path) -> list[str]:
    lines = (made_data / "lambada" / "lambada_test.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(lines[number])["text"] for number in EXAMPLES]


@pytest.fixture(scope="module")
def pages(made_data: Path) -> list[str]:
    """The first documents, each cut to a length that fills several windows and leaves a part of one."""
    text = (made_data / "wikitext-103" / "wiki.test.tokens").read_bytes().decode()
    return [page[:2500] for page in lm_eval_documents(text)][:NUM_DOCUMENTS]


@pytest.fixture(scope="module")
def directory(
    made_data: Path, made_tokenizer: Tokenizer, passages: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny GPT-2 that learnt some of the passages by heart, as `save_pretrained` writes it."""
    torch.manual_seed(1)
    end = made_tokenizer.end_of_text
    config = transformers.GPT2Config(
        vocab_size=made_tokenizer.vocab_size, bos_token_id=end, eos_token_id=end,
        n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    learnt = [torch.tensor(made_tokenizer.encode(passage)[-CONTEXT - 1 :]) for passage in passages[:5]]
    targets = torch.cat([ids[-4:] for ids in learnt])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(25):
        states = torch.cat([model.transformer(ids[None, :-1])[0][0, -4:] for ids in learnt])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model.lm_head(states), targets).backward()
        optimizer.step()
    path = tmp_path_factory.mktemp("outsider") / "gpt2"
    model.save_pretrained(path)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(made_data / "gpt2-bpe" / name, path)
    return path


@pytest.fixture(scope="module")
def outsider(directory: Path) -> Any:
    return transformers.GPT2LMHeadModel.from_pretrained(directory).eval()


def ours(directory: Path, make: Callable[[Tokenizer], Task], **settings: int) -> Evaluation:
    build: MakeTask = lambda evaluated: make(evaluated.tokenizer)  # noqa: E731
    return evaluate(directory, {"it": build}, Settings(**{"workers": 1, **settings})).done["it"]


@pytest.fixture
def harness_model(outsider: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """lm-evaluation-harness's own Hugging Face model. It imports accelerate, which it needs for several GPUs only."""
    if importlib.util.find_spec("accelerate") is None:
        for name in ("accelerate", "accelerate.utils"):
            monkeypatch.setitem(sys.modules, name, MagicMock())
    from lm_eval.models.huggingface import HFLM

    tokenizer = transformers.GPT2TokenizerFast.from_pretrained(directory)
    return HFLM(pretrained=outsider, tokenizer=tokenizer, batch_size=3, max_length=CONTEXT, device="cpu")


def harness_metrics(model: Any, task: dict[str, Any], rows: list[dict[str, str]], where: Path) -> Any:
    """lm-evaluation-harness's results on rows of a local file."""
    where.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task |= {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(where)}}, "test_split": "test"}
    manager = lm_eval.tasks.TaskManager(include_defaults=False)
    done = lm_eval.simple_evaluate(model, tasks=[task], task_manager=manager, bootstrap_iters=0)
    return done["results"][task["task"]]


def source(name: str) -> SourceText:
    return SourceText(name, name, "digest")


def by_document(pages: list[str]) -> Callable[[Tokenizer], Task]:
    def make(tokenizer: Tokenizer) -> Task:
        text = RunningText.of_wikitext(source("wikitext103-lm-eval"), "\n".join([" ", *pages]))
        return PerplexityTask(text, document_stream(text, tokenizer, CONTEXT), tokenizer, divisor="lm-eval words")

    return make


def test_word_perplexity_is_lm_evaluation_harness_s(
    harness_model: Any, directory: Path, pages: list[str], tmp_path: Path
) -> None:
    from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer

    task = {
        "task": "local_wikitext",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": wikitext_detokenizer,
        "process_results": process_results,
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    }
    theirs = harness_metrics(harness_model, task, [{"page": page} for page in pages], tmp_path / "pages.jsonl")
    result = ours(directory, by_document(pages)).result
    assert isinstance(result, PerplexityResult)
    assert result.perplexity == pytest.approx(theirs["word_perplexity,none"], rel=1e-4)
    joints = sum(map(len, map(str.encode, pages))) / len("\n".join([" ", *pages]).encode())
    assert result.bits_per_byte == pytest.approx(theirs["bits_per_byte,none"] * joints, rel=1e-4)


def test_lambada_is_lm_evaluation_harness_s(
    harness_model: Any, directory: Path, passages: list[str], tmp_path: Path
) -> None:
    task = {
        "task": "local_lambada",
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' '+text.split(' ')[-1]}}",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        ],
    }
    rows = [{"text": passage} for passage in passages]
    theirs = harness_metrics(harness_model, task, rows, tmp_path / "passages.jsonl")
    results = {
        rule: ours(directory, lambda t, r=rule: ClozeTask(source("l"), passages, r, t, CONTEXT)).result  # type: ignore[misc]
        for rule in (LM_EVAL, STRICT)
    }
    assert isinstance(result := results[LM_EVAL], ClozeResult)
    assert isinstance(strict := results[STRICT], ClozeResult)
    assert result.accuracy == theirs["acc,none"]
    assert 0 < result.accuracy < 1
    assert result.perplexity == pytest.approx(theirs["perplexity,none"], rel=1e-4)
    assert strict.perplexity != pytest.approx(result.perplexity, rel=1e-3)  # the newline examples differ


def strided_perplexity(text: str, model: Any, tokenizer: Any, context: int) -> float:
    """The strided loop of transformers' docs/source/en/perplexity.md, its stride half of the context."""
    rows = [row if row.strip() else "" for row in text.splitlines(keepends=True)]
    ids = tokenizer("\n\n".join(rows), return_tensors="pt").input_ids
    nll_sum, num_tokens, previous_end = 0.0, 0, 0
    for begin in range(0, ids.size(1), context // 2):
        end = min(begin + context, ids.size(1))
        targets = ids[:, begin:end].clone()
        targets[:, : -(end - previous_end)] = -100
        with torch.no_grad():
            loss = model(ids[:, begin:end], labels=targets).loss
        num_loss_tokens = int((targets != -100).sum()) - 1
        nll_sum, num_tokens, previous_end = nll_sum + loss.item() * num_loss_tokens, num_tokens + num_loss_tokens, end
        if end == ids.size(1):
            break
    return math.exp(nll_sum / num_tokens)


def test_strided_perplexity_is_that_of_hugging_face_s_recipe(outsider: Any, directory: Path, made_data: Path) -> None:
    """On the first rows."""
    text = (made_data / "wikitext-103" / "wiki.test.tokens").read_bytes().decode()[:6000]
    theirs = strided_perplexity(text, outsider, transformers.GPT2TokenizerFast.from_pretrained(directory), CONTEXT)

    def make(tokenizer: Tokenizer) -> Task:
        running = RunningText.of_wikitext(source("wikitext103-huggingface"), text)
        stream = sliding_stream(running, ROWS, tokenizer, CONTEXT - 1, CONTEXT // 2)
        return PerplexityTask(running, stream, tokenizer, divisor="transformers labels")

    result = ours(directory, make).result
    assert result.perplexity == pytest.approx(theirs, rel=1e-4)


def test_every_target_of_a_sliding_window_is_a_plain_loop_s(outsider: Any, directory: Path, pages: list[str]) -> None:
    def whole(tokenizer: Tokenizer) -> Task:
        text = RunningText.of_documents(source("perplexity"), pages[:1])
        return PerplexityTask(text, sliding_stream(text, UNCHANGED, tokenizer, CONTEXT, 2), tokenizer)

    mine = ours(directory, whole)
    ids = torch.tensor(Tokenizer.from_gpt2_files(directory / "vocab.json", directory / "merges.txt").encode(pages[0]))
    expected = []
    with torch.no_grad():
        for target in range(1, len(ids)):
            start = 2 * max(0, math.ceil((target - CONTEXT) / 2))
            logits = outsider(ids[None, start:target]).logits[0, -1]
            expected.append(torch.log_softmax(logits.double(), 0)[ids[target]].item())
    assert mine.scores.log_probabilities.tolist() == pytest.approx(expected, rel=1e-4)


def test_rolling_windows_are_lm_evaluation_harness_s() -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    for length in (1, 7, 8, 9, 16, 17, 30):
        document = list(range(100, 100 + length))
        theirs = [make_disjoint_window(pair) for pair in get_rolling_token_windows(document, 0, 8, 1)]
        requests = rolling_requests(document, 0, 8)
        assert [(r.tokens[: -r.num_scored].tolist(), r.tokens[-r.num_scored :].tolist()) for r in requests] == theirs
