"""A user's text by the recipes of programs: lm-evaluation-harness as it is installed, others restated."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import Command
from tests.evaluation.conftest import Evaluated
from tests.evaluation.test_pretrained import TEXT, made

transformers = pytest.importorskip("transformers")
DOCUMENTS = [TEXT * 2, "the river slept below é", TEXT[40:300]]
WINDOW = 48


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
    """`llama_eval` of GPTQ's llama.py: shifted logits of each window, mean loss times the window, over all."""
    found = evaluated("perplexity-gptq", file, "--ckpt", directory, "--window", WINDOW)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ids = torch.tensor(tokenizer("\n\n".join(DOCUMENTS)).input_ids)
    samples = len(ids) // WINDOW
    nlls = [losses(directory, ids[i * WINDOW : (i + 1) * WINDOW]).mean() * WINDOW for i in range(samples)]
    assert found["perplexity"] == pytest.approx(math.exp(sum(nlls) / (samples * WINDOW)), rel=1e-6)
    assert found["window"] == WINDOW


def test_llama_cpp_s_recipe(directory: Path, file: Path, evaluated: Evaluated) -> None:
    """The second half of each chunk; a tokenizer's first token stands in place of each chunk's first."""
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


def test_lm_evaluation_harness_s_number_and_the_honest_one(directory: Path, file: Path, evaluated: Evaluated) -> None:
    """Release 0.4.13 scores a tokenizer's first token after itself; without such a token both numbers are one."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model: Any = HFLM(pretrained=str(directory), dtype="float32", device="cpu", batch_size=1)
    asked = [Instance("loglikelihood_rolling", {}, (text,), number) for number, text in enumerate(DOCUMENTS)]
    theirs = -sum(model.loglikelihood_rolling(asked, disable_tqdm=True))
    double, once = (
        evaluated(f"perplexity-lm-eval{release}", file, "--ckpt", directory) for release in ("-bos-twice", "")
    )
    nll = {name: each["loss_per_token"] * each["num_scored_tokens"] for name, each in (("0.4.13", double), ("", once))}
    assert nll["0.4.13"] == pytest.approx(theirs, rel=1e-6)
    assert (abs(nll[""] / theirs - 1) > 1e-4) == (once["first_tokens"] == ["<s>"])
    assert "as in lm-evaluation-harness 0.4.13" in double["protocol"]
    assert "as in lm-evaluation-harness 0.4.13" not in once["protocol"]


def test_what_a_program_cannot_do_is_said(directory: Path, tmp_path: Path, file: Path, mlm_eval: Command) -> None:
    (tmp_path / "short.txt").write_text("the cat")
    short = mlm_eval("perplexity-gptq", tmp_path / "short.txt", "--ckpt", directory, "--set", "workers=1", ends=2)
    assert "fewer than a window of 64" in short.error
    asked = ("perplexity-gptq", file, "--ckpt", directory, "--stride", 8)
    assert "has its own stride" in mlm_eval(*asked, ends=2).error
