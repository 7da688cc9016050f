"""A user's text by the recipes of programs: lm-evaluation-harness as it is installed, others
restated."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mlm_repro.data_pipeline.contamination.testsets import TEST_SETS
from mlm_repro.lineage.digest import sha256_file
from tests.commands import Command
from tests.evaluation.conftest import Evaluated
from tests.evaluation.test_pretrained import TEXT, made
from tests.made_data import wikitext

transformers = pytest.importorskip("transformers")
DOCUMENTS = [TEXT * 2, "the river slept below é", TEXT[40:300]]
WINDOW, CONTEXT = 48, 64


@pytest.fixture(params=["LlamaConfig", "Qwen2Config"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model whose tokenizer puts a token before every text, and one whose tokenizer puts none."""
    return made(tmp_path / "model", request.param)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return path


def losses(directory: Path, rows: torch.Tensor) -> torch.Tensor:
    """Nats of every token of a row after the first."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.inference_mode():
        logits = model(input_ids=rows[None, :-1]).logits[0].double()
    return -logits.log_softmax(-1).gather(1, rows[1:, None])[:, 0]


def test_gptq_s_recipe(directory: Path, file: Path, evaluated: Evaluated) -> None:
    """`llama_eval` of GPTQ's llama.py: shifted logits of each window, mean loss times the window,
    over all."""
    found = evaluated("perplexity-gptq", file, "--ckpt", directory, "--window", WINDOW)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ids = torch.tensor(tokenizer("\n\n".join(DOCUMENTS)).input_ids)
    samples = len(ids) // WINDOW
    nlls = [
        losses(directory, ids[i * WINDOW : (i + 1) * WINDOW]).mean() * WINDOW
        for i in range(samples)
    ]
    assert found["perplexity"] == pytest.approx(math.exp(sum(nlls) / (samples * WINDOW)), rel=1e-6)
    assert found["window"] == WINDOW


def test_llama_cpp_s_recipe(directory: Path, file: Path, evaluated: Evaluated) -> None:
    """The second half of each chunk; a tokenizer's first token stands in place of each chunk's
    first."""
    found = evaluated("perplexity-llama.cpp", file, "--ckpt", directory, "--window", WINDOW)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ids, nll, count = torch.tensor(tokenizer("\n\n".join(DOCUMENTS)).input_ids), 0.0, 0
    for chunk in range(len(ids) // WINDOW):
        row = ids[chunk * WINDOW : (chunk + 1) * WINDOW].clone()
        if tokenizer("").input_ids:
            row[0] = tokenizer.bos_token_id
        for j in range(WINDOW // 2, WINDOW - 1):
            nll, count = nll + losses(directory, row)[j].item(), count + 1
    assert found["perplexity"] == pytest.approx(math.exp(nll / count), rel=1e-6)


def test_nanochat_s_bits_per_byte(directory: Path, file: Path, evaluated: Evaluated) -> None:
    """`evaluate_bpb`: each target counts with the bytes of its token, a first token with none."""
    found = evaluated("perplexity-nanochat", file, "--ckpt", directory, "--window", WINDOW)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    stream: list[int] = []
    for document in DOCUMENTS:
        stream += [tokenizer.bos_token_id, *tokenizer(document, add_special_tokens=False).input_ids]
    ids, nats = torch.tensor(stream), 0.0
    for start in range(0, len(ids) - 1, WINDOW):
        row = ids[start : start + WINDOW + 1]
        nats += losses(directory, row)[row[1:] != tokenizer.bos_token_id].sum().item()
    num_bytes = sum(len(document.encode()) for document in DOCUMENTS)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-6)


def test_lm_evaluation_harness_s_number_and_the_honest_one(
    directory: Path, file: Path, evaluated: Evaluated
) -> None:
    """Release 0.4.13 scores a tokenizer's first token after itself; without such a token both
    numbers are one."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model: Any = HFLM(pretrained=str(directory), dtype="float32", device="cpu", batch_size=1)
    asked = [
        Instance("loglikelihood_rolling", {}, (text,), number)
        for number, text in enumerate(DOCUMENTS)
    ]
    theirs = -sum(model.loglikelihood_rolling(asked, disable_tqdm=True))
    double, once = (
        evaluated(f"perplexity-lm-eval{release}", file, "--ckpt", directory)
        for release in ("-bos-twice", "")
    )
    nll = {
        name: each["loss_per_token"] * each["num_scored_tokens"]
        for name, each in (("0.4.13", double), ("", once))
    }
    assert nll["0.4.13"] == pytest.approx(theirs, rel=1e-6)
    assert (abs(nll[""] / theirs - 1) > 1e-4) == (once["first_tokens"] == ["<s>"])
    assert "as in lm-evaluation-harness 0.4.13" in double["protocol"]
    assert "as in lm-evaluation-harness 0.4.13" not in once["protocol"]


@pytest.fixture
def wikitext2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A file in the form of WikiText-2's raw test file that passes for it, and its rows joined as
    recipes join them."""
    path = tmp_path / "wiki.test.raw"
    path.write_text(wikitext(3, seed=1))
    passing = TEST_SETS["wikitext2"].model_copy(update={"sha256": sha256_file(path)})
    monkeypatch.setitem(TEST_SETS, "wikitext2", passing)
    return path, "\n\n".join(
        "" if line == " \n" else line for line in path.read_text().splitlines(keepends=True)
    )


def test_wikitext2_by_gptq_s_recipe(
    directory: Path, wikitext2: tuple[Path, str], evaluated: Evaluated
) -> None:
    found = evaluated("wikitext2-gptq", wikitext2[0], "--ckpt", directory)
    ids = torch.tensor(
        transformers.AutoTokenizer.from_pretrained(directory)(wikitext2[1]).input_ids
    )
    samples = len(ids) // CONTEXT
    assert samples > 3
    nlls = [
        losses(directory, ids[i * CONTEXT : (i + 1) * CONTEXT]).mean() * CONTEXT
        for i in range(samples)
    ]
    assert found["perplexity"] == pytest.approx(math.exp(sum(nlls) / (samples * CONTEXT)), rel=1e-6)
    assert found["num_original_tokens"] == wikitext2[0].read_text().strip().count(" ") + 1


def test_wikitext2_by_transformers_page(
    directory: Path, wikitext2: tuple[Path, str], evaluated: Evaluated
) -> None:
    """docs/source/en/perplexity.md, word for word but for its sizes."""
    found = evaluated("wikitext2-huggingface", wikitext2[0], "--ckpt", directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    input_ids = transformers.AutoTokenizer.from_pretrained(directory)(
        wikitext2[1], return_tensors="pt"
    ).input_ids
    max_length, stride, seq_len = CONTEXT, CONTEXT // 2, input_ids.size(1)
    nll_sum, n_tokens, prev_end_loc = 0.0, 0, 0
    for begin_loc in range(0, seq_len, stride):
        end_loc = min(begin_loc + max_length, seq_len)
        trg_len = end_loc - prev_end_loc
        target_ids = input_ids[:, begin_loc:end_loc].clone()
        target_ids[:, :-trg_len] = -100
        with torch.no_grad():
            loss = model(input_ids[:, begin_loc:end_loc], labels=target_ids).loss
        num_loss_tokens = int((target_ids != -100).sum()) - 1
        nll_sum, n_tokens = nll_sum + loss.item() * num_loss_tokens, n_tokens + num_loss_tokens
        prev_end_loc = end_loc
        if end_loc == seq_len:
            break
    assert found["perplexity"] == pytest.approx(math.exp(nll_sum / n_tokens), rel=1e-6)


def test_wikitext2_by_lm_evaluation_harness(
    directory: Path, wikitext2: tuple[Path, str], evaluated: Evaluated
) -> None:
    """Its model, its detokenizer and its words; release 0.4.13 scores a tokenizer's first token
    after itself."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer

    rows, page = [], list[str]()  # as the data set EleutherAI/wikitext_document_level cuts pages
    for line in [*wikitext2[0].read_text().split("\n"), "= ="]:
        heading = line.replace("= = =", "===").replace("= =", "==").strip()
        if (heading.startswith("= ") and heading.endswith(" =")) or line == "= =":
            rows += [{"page": "\n".join(page)}] * bool("\n".join(page).strip())
            page = []
        page.append(line)
    assert len(rows) > 2
    model: Any = HFLM(pretrained=str(directory), dtype="float32", device="cpu", batch_size=1)
    asked = [
        Instance("loglikelihood_rolling", {}, (wikitext_detokenizer(row),), n)
        for n, row in enumerate(rows)
    ]
    answers = model.loglikelihood_rolling(asked, disable_tqdm=True)
    pairs = [
        process_results(row, [each])["word_perplexity"]
        for row, each in zip(rows, answers, strict=True)
    ]
    theirs = math.exp(-sum(each for each, _ in pairs) / sum(words for _, words in pairs))
    once, twice = (
        evaluated(f"wikitext2-lm-eval{end}", wikitext2[0], "--ckpt", directory)
        for end in ("", "-bos-twice")
    )
    assert twice["perplexity"] == pytest.approx(theirs, rel=1e-6)
    assert (once["perplexity"] == twice["perplexity"]) == (once["first_tokens"] == [])


def test_another_file_is_not_wikitext2(
    directory: Path, wikitext2: tuple[Path, str], mlm_eval: Command
) -> None:
    wikitext2[0].write_text(wikitext2[1])
    refused = mlm_eval("wikitext2-gptq", wikitext2[0], "--ckpt", directory, ends=6)
    assert "is not the WikiText-2 raw test file wiki.test.raw" in refused.error
    assert "all takes no file" in mlm_eval("all", wikitext2[0], "--ckpt", directory, ends=2).error


def test_what_a_program_cannot_do_is_said(
    directory: Path, tmp_path: Path, file: Path, mlm_eval: Command
) -> None:
    (tmp_path / "short.txt").write_text("the cat")
    short = mlm_eval(
        "perplexity-gptq", tmp_path / "short.txt", "--ckpt", directory, "--set", "workers=1", ends=2
    )
    assert "fewer than a window of 64" in short.error
    asked = ("perplexity-gptq", file, "--ckpt", directory, "--stride", 8)
    assert "has its own stride" in mlm_eval(*asked, ends=2).error
