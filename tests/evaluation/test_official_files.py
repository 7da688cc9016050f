"""The official files: how the texts are cut into streams and windows, and what is refused, on made
files."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from mlm_repro.data_pipeline.contamination.testsets import TEST_SETS
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.evaluation.tasks import wikitext103 as wikitext103_module
from mlm_repro.evaluation.tasks.documents import RunningText, cut_articles
from mlm_repro.evaluation.tasks.lambada import openai_lambada
from mlm_repro.evaluation.tasks.names import TASKS, build_task
from mlm_repro.evaluation.tasks.perplexity import UNCHANGED, Detokenizer, PerplexityTask
from mlm_repro.evaluation.tasks.wikitext103 import (
    MEGATRON,
    ROWS,
    huggingface_wikitext,
    sliding_wikitext103,
)
from mlm_repro.lineage.errors import IntegrityFailure

pytestmark = pytest.mark.usefixtures("made_passes_for_published")


@pytest.fixture
def wikitext_file(made_data: Path) -> Path:
    return made_data / TEST_SETS["wikitext103"].place


@pytest.mark.parametrize("name", TASKS)
def test_a_protocol_is_built_under_its_name(name: str, made_tokenizer: Tokenizer) -> None:
    without_dataset = Mock(
        ["tokenizer", "model"], tokenizer=made_tokenizer, model=Mock(seq_length=128)
    )
    task = build_task(name, without_dataset).limited(10)
    assert task.name == name
    assert len(task.requests) == 10


@pytest.mark.parametrize("detokenizer", [MEGATRON, UNCHANGED, ROWS])
def test_articles_tokenized_apart_are_the_whole_file(
    made_passes_for_published: RunningText, made_tokenizer: Tokenizer, detokenizer: Detokenizer
) -> None:
    text = made_passes_for_published
    detokenized = detokenizer.apply(text.text)
    articles = cut_articles(text, detokenized)
    assert "".join(articles) == detokenized
    assert [
        token for ids in made_tokenizer.encode_batch(articles) for token in ids
    ] == made_tokenizer.encode(detokenized)
    for (title, _), article in zip(text.articles, articles, strict=True):
        assert article.lstrip().startswith(f"= {title[:3]}")


def test_window_and_stride_follow_the_model_s_context(
    wikitext_file: Path, made_tokenizer: Tokenizer
) -> None:
    short = sliding_wikitext103("x", wikitext_file, made_tokenizer, 128).limited(10)
    assert [len(request.tokens) for request in short.requests] == [129] * 10
    assert [request.num_scored for request in short.requests] == [4] * 10
    half = sliding_wikitext103("x", wikitext_file, made_tokenizer, 128, stride=512).limited(10)
    assert [request.num_scored for request in half.requests] == [64] * 10
    long = sliding_wikitext103("x", wikitext_file, made_tokenizer, 4096).limited(10)
    assert [len(request.tokens) for request in long.requests] == [1025] * 10


def test_strides_of_transformers_recipe(made_data: Path, made_tokenizer: Tokenizer) -> None:
    """Half a window, on its own text 512 at most, as its page has it."""
    for name, context, stride in (
        ("wikitext103", 2048, 1024),
        ("wikitext2", 2048, 512),
        ("wikitext2", 128, 64),
    ):
        task = huggingface_wikitext(
            "x", made_data / TEST_SETS[name].place, made_tokenizer, context, name
        )
        assert (task.stream.window, task.stream.stride) == (context - 1, stride)


def test_gptq_s_window_is_2048_unless_another_is_asked_for(
    made_data: Path, made_tokenizer: Tokenizer
) -> None:
    long = Mock(["tokenizer", "model"], tokenizer=made_tokenizer, model=Mock(seq_length=4096))
    path = made_data / TEST_SETS["wikitext2"].place
    tasks = [build_task("wikitext2-gptq", long, window, path) for window in (None, 3000)]
    assert [
        (task.name, task.stream.window) for task in tasks if isinstance(task, PerplexityTask)
    ] == [("wikitext2-gptq", 2048), ("wikitext2-gptq-window3000", 3000)]


def test_another_wikitext_file_is_refused(
    made_data: Path, tmp_path: Path, made_tokenizer: Tokenizer
) -> None:
    with pytest.raises(IntegrityFailure, match="is not the WikiText-103 test file"):
        sliding_wikitext103(
            "x", made_data / "wikitext-103" / "wiki.valid.tokens", made_tokenizer, 1024
        )
    changed = tmp_path / "wiki.test.tokens"
    changed.write_bytes((made_data / "wikitext-103" / "wiki.test.tokens").read_bytes() + b" ")
    with pytest.raises(IntegrityFailure, match="SHA-256"):
        sliding_wikitext103("x", changed, made_tokenizer, 1024)


def test_a_detokenizer_that_gives_another_count_is_refused(
    wikitext_file: Path, made_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sliding_wikitext103("x", wikitext_file, made_tokenizer, 1024).stream.num_tokens
    monkeypatch.setattr(wikitext103_module, "has_gpt2_vocabulary", lambda tokenizer: True)
    monkeypatch.setitem(wikitext103_module.NUM_GPT2_TOKENS, MEGATRON, found)
    sliding_wikitext103("x", wikitext_file, made_tokenizer, 1024)
    monkeypatch.setitem(wikitext103_module.NUM_GPT2_TOKENS, MEGATRON, found - 1)
    with pytest.raises(
        IntegrityFailure, match=f"{found} GPT-2 tokens here, not the published {found - 1}"
    ):
        sliding_wikitext103("x", wikitext_file, made_tokenizer, 1024)


def test_the_original_plain_text_lambada_is_refused(
    made_data: Path, made_tokenizer: Tokenizer
) -> None:
    with pytest.raises(IntegrityFailure, match="is not OpenAI's LAMBADA"):
        openai_lambada(
            "lambada", made_data / "lambada" / "lambada_test_plain_text.txt", made_tokenizer, 1024
        )
