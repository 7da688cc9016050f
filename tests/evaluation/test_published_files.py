"""The constants of the protocols on the published files with the published vocabulary."""

from collections import Counter
from pathlib import Path

import pytest

from data_pipeline.tokenizer import Tokenizer
from evaluation import wikitext103 as wikitext103_module
from evaluation.detokenize import detokenize_wikitext
from evaluation.lambada import lambada, read_passages
from evaluation.perplexity import SlidingPerplexity, count_original_tokens
from evaluation.wikitext103 import wikitext103
from lineage.errors import IntegrityFailure


@pytest.fixture(scope="module")
def wikitext_file(published: Path) -> Path:
    return published / "wikitext-103" / "wiki.test.tokens"


@pytest.fixture(scope="module")
def wikitext_task(wikitext_file: Path, gpt2_tokenizer: Tokenizer) -> SlidingPerplexity:
    return wikitext103(wikitext_file, gpt2_tokenizer, 1024)


def test_wikitext103_counts(wikitext_file: Path, wikitext_task: SlidingPerplexity) -> None:
    assert count_original_tokens(wikitext_file.read_bytes().decode()) == 245_566
    assert len(wikitext_task.tokens) == 270_330
    assert len(wikitext_task.windows) == 8417
    assert sum(request.num_scored for request in wikitext_task.requests) == 270_329


def test_megatron_s_token_ratio_to_the_last_digit(wikitext_task: SlidingPerplexity) -> None:
    assert (len(wikitext_task.tokens) - 1) / (245_566 - 1) == 1.1008449901248143


def test_detokenized_file_begins_and_ends_as_megatron_s(
    wikitext_task: SlidingPerplexity, gpt2_tokenizer: Tokenizer
) -> None:
    assert gpt2_tokenizer.decode(wikitext_task.tokens[:1]) == "\n"
    assert gpt2_tokenizer.decode(wikitext_task.tokens[-1:]) == "\n\n"


def test_raw_file_has_285234_tokens(wikitext_file: Path, gpt2_tokenizer: Tokenizer) -> None:
    assert len(gpt2_tokenizer.encode(wikitext_file.read_bytes().decode())) == 285_234


def test_detokenizer_loses_no_word(wikitext_file: Path) -> None:
    def visible(text: str) -> str:
        for mark in ("@-@", "@,@", "@.@"):
            text = text.replace(mark, mark[1])
        return "".join(text.split())

    raw = wikitext_file.read_bytes().decode()
    detokenized = detokenize_wikitext(raw)
    assert visible(detokenized) == visible(raw)
    assert detokenized.count("\n") == 4332


def test_window_and_stride_follow_the_model_s_context(wikitext_file: Path, gpt2_tokenizer: Tokenizer) -> None:
    short = wikitext103(wikitext_file, gpt2_tokenizer, 128, limit=10)
    assert [len(request.tokens) for request in short.requests] == [129] * 10
    assert [request.num_scored for request in short.requests] == [4] * 10
    long = wikitext103(wikitext_file, gpt2_tokenizer, 4096, limit=10)
    assert [len(request.tokens) for request in long.requests] == [1025] * 10


def test_another_wikitext_file_is_refused(published: Path, tmp_path: Path, gpt2_tokenizer: Tokenizer) -> None:
    with pytest.raises(IntegrityFailure, match="is not the WikiText-103 test file"):
        wikitext103(published / "wikitext-103" / "wiki.valid.tokens", gpt2_tokenizer, 1024)
    changed = tmp_path / "wiki.test.tokens"
    changed.write_bytes((published / "wikitext-103" / "wiki.test.tokens").read_bytes() + b" ")
    with pytest.raises(IntegrityFailure, match="SHA-256"):
        wikitext103(changed, gpt2_tokenizer, 1024)


def test_a_detokenizer_that_gives_another_count_is_refused(
    wikitext_file: Path, gpt2_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wikitext103_module, "detokenize_wikitext", lambda text: text)
    with pytest.raises(IntegrityFailure, match="285234 GPT-2 tokens here, not the published 270330"):
        wikitext103(wikitext_file, gpt2_tokenizer, 1024)


def test_lambada_counts(published: Path, gpt2_tokenizer: Tokenizer) -> None:
    path = published / "lambada" / "lambada_test.jsonl"
    passages = read_passages(path)
    assert len(passages) == 5153
    assert sum("\n" in passage for passage in passages) == 4642
    task = lambada(path, gpt2_tokenizer, 1024)
    assert Counter(request.num_scored for request in task.requests) == {1: 4013, 2: 913, 3: 208, 4: 16, 5: 3}
    assert sum(request.num_scored for request in task.requests) == 6542
    assert sum(len(request.tokens) for request in task.requests) == 430_217
    assert max(len(request.tokens) for request in task.requests) == 224


def test_the_original_plain_text_lambada_is_refused(published: Path, gpt2_tokenizer: Tokenizer) -> None:
    with pytest.raises(IntegrityFailure, match="is not OpenAI's LAMBADA"):
        lambada(published / "lambada" / "lambada_test_plain_text.txt", gpt2_tokenizer, 1024)
