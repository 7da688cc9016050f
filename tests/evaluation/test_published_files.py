"""The constants of the protocols on the published files with the published vocabulary."""

from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest

from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.evaluation.tasks.cloze import ClozeTask
from mlm_repro.evaluation.tasks.detokenize import detokenize_wikitext
from mlm_repro.evaluation.tasks.documents import count_original_tokens, lm_eval_documents
from mlm_repro.evaluation.tasks.names import TASKS, build_task
from mlm_repro.evaluation.tasks.perplexity import PerplexityTask
from mlm_repro.evaluation.tasks.wikitext103 import read_wikitext


def without_dataset(tokenizer: Tokenizer) -> Mock:
    return Mock(["tokenizer", "model"], tokenizer=tokenizer, model=Mock(seq_length=1024))


@pytest.fixture(scope="module")
def wikitext_file(published: Path) -> Path:
    return published / "wikitext-103" / "wiki.test.tokens"


@pytest.fixture(scope="module")
def gpt2_tokenizer(published: Path) -> Tokenizer:
    """OpenAI's vocabulary."""
    return Tokenizer.from_gpt2_files(
        published / "gpt2-bpe" / "vocab.json", published / "gpt2-bpe" / "merges.txt"
    )


@pytest.fixture(scope="module")
def perplexity_tasks(gpt2_tokenizer: Tokenizer) -> dict[str, PerplexityTask]:
    tasks = {
        name: build_task(name, without_dataset(gpt2_tokenizer))
        for name in TASKS
        if "wikitext103" in name
    }
    return {name: task for name, task in tasks.items() if isinstance(task, PerplexityTask)}


@pytest.fixture(scope="module")
def cloze_tasks(gpt2_tokenizer: Tokenizer) -> dict[str, ClozeTask]:
    tasks = {
        name: build_task(name, without_dataset(gpt2_tokenizer))
        for name in TASKS
        if "lambada" in name
    }
    return {name: task for name, task in tasks.items() if isinstance(task, ClozeTask)}


@pytest.mark.parametrize(
    ("name", "num_tokens", "num_scored", "num_windows", "scored_last"),
    [
        ("wikitext103", 270_330, 270_329, 8417, 25),
        ("wikitext103-stride512", 270_330, 270_329, 527, 505),
        ("wikitext103-stride1024", 270_330, 270_329, 264, 1017),
        ("wikitext103-raw", 285_234, 285_233, 8883, 17),
        ("wikitext103-lm-eval", 270_263, 270_263, 296, 703),
        ("wikitext103-huggingface", 286_657, 286_656, 559, 449),
    ],
)
def test_wikitext103_counts(
    perplexity_tasks: dict[str, PerplexityTask],
    name: str,
    num_tokens: int,
    num_scored: int,
    num_windows: int,
    scored_last: int,
) -> None:
    task = perplexity_tasks[name]
    assert task.stream.num_tokens == num_tokens
    assert len(task.requests) == num_windows
    assert sum(request.num_scored for request in task.requests) == num_scored
    assert task.requests[-1].num_scored == scored_last
    assert sum(block.num_targets for block in task.stream.blocks) == num_scored
    assert len(task.stream.blocks) == (62 if name == "wikitext103-lm-eval" else 60)


def test_words_by_each_count(wikitext_file: Path) -> None:
    text = read_wikitext("wikitext103", wikitext_file)
    assert count_original_tokens(text.text) == text.num_original_tokens == 245_566
    assert text.num_lm_eval_words == 241_335
    assert text.num_bytes == 1_281_077
    documents = list(lm_eval_documents(text.text))
    assert (len(text.articles), len(documents)) == (60, 62)
    assert "\n".join([" ", *documents]) == text.text


def test_detokenized_file_begins_and_ends_as_megatron_s(
    perplexity_tasks: dict[str, PerplexityTask], gpt2_tokenizer: Tokenizer
) -> None:
    requests = perplexity_tasks["wikitext103"].requests
    assert gpt2_tokenizer.decode(requests[0].tokens[:1]) == "\n"
    assert gpt2_tokenizer.decode(requests[-1].tokens[-1:]) == "\n\n"


def test_detokenizer_loses_no_word(wikitext_file: Path) -> None:
    def visible(text: str) -> str:
        for mark in ("@-@", "@,@", "@.@"):
            text = text.replace(mark, mark[1])
        return "".join(text.split())

    raw = wikitext_file.read_bytes().decode()
    detokenized = detokenize_wikitext(raw)
    assert visible(detokenized) == visible(raw)
    assert detokenized.count("\n") == 4332


@pytest.mark.parametrize(
    ("name", "sub_words"),
    [
        ("lambada", {1: 4013, 2: 913, 3: 208, 4: 16, 5: 3}),
        ("lambada-lm-eval", {1: 4010, 2: 913, 3: 205, 4: 17, 5: 4, 8: 3, 10: 1}),
        ("lambada-last-token", {1: 5153}),
        ("lambada-stopword-filter", {1: 4013, 2: 913, 3: 208, 4: 16, 5: 3}),
        ("lambada-standard", {1: 2819, 2: 1876, 3: 438, 4: 20}),
    ],
)
def test_lambada_counts(
    cloze_tasks: dict[str, ClozeTask], name: str, sub_words: dict[int, int]
) -> None:
    assert Counter(request.num_scored for request in cloze_tasks[name].requests) == sub_words


def test_lambada_lengths(cloze_tasks: dict[str, ClozeTask]) -> None:
    lengths = {
        name: [len(request.tokens) for request in task.requests]
        for name, task in cloze_tasks.items()
    }
    assert (sum(lengths["lambada"]), max(lengths["lambada"])) == (430_217, 224)
    assert (sum(lengths["lambada-standard"]), max(lengths["lambada-standard"])) == (419_406, 223)


def test_the_rules_differ_on_the_seven_examples_with_a_newline_before_the_last_word(
    cloze_tasks: dict[str, ClozeTask],
) -> None:
    strict, theirs = cloze_tasks["lambada"].requests, cloze_tasks["lambada-lm-eval"].requests
    differing = [
        n
        for n, (a, b) in enumerate(zip(strict, theirs, strict=True))
        if a.tokens.tolist() != b.tokens.tolist()
    ]
    assert differing == [426, 1053, 2881, 3047, 3977, 4351, 4462]


def test_stop_words_are_whole_tokens(
    cloze_tasks: dict[str, ClozeTask], gpt2_tokenizer: Tokenizer
) -> None:
    banned = cloze_tasks["lambada-stopword-filter"].banned
    assert banned is not None
    assert cloze_tasks["lambada"].banned is None
    texts = {gpt2_tokenizer.decode([token]) for token in banned}
    assert {" the", " her", " The", "and", " I"} <= texts
    assert not {" Helen", " there's", ".", " signs", " theatre"} & texts
