"""`mlm-eval identify`: conventions planted by this suite and by other programs are named, and else it says none."""

import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.contamination.testsets import TEST_SETS
from data_pipeline.tokens.tokenizer import Tokenizer
from evaluation.detokenize import detokenize_wikitext
from evaluation.documents import lm_eval_documents
from tests.commands import Command
from tests.evaluation.conftest import Evaluated
from tests.evaluation.test_outsiders_on_hf import harness_metrics, strided_perplexity
from tests.made_data import wikitext

transformers = pytest.importorskip("transformers")
pytest.importorskip("lm_eval")

CONTEXT = 32
MEGATRON = "megatron-wikitext"
FINE, PER_WORD = "a 32nd at a time", {"divided by": "original tokens"}
DISJOINT = {"text": MEGATRON, "windows": "disjoint"}
STRICT = {"text": "lambada", "before": "nothing", "target": "last word"}
PLANTED: dict[str, tuple[str, str, int, dict[str, str]]] = {
    "Megatron's": ("wikitext103", "perplexity", 2, {"text": MEGATRON, "windows": FINE} | PER_WORD),
    "half": ("wikitext103-stride512", "perplexity", 2, {"text": MEGATRON, "windows": "overlapping by half"} | PER_WORD),
    "disjoint": ("wikitext103-stride1024", "perplexity", 2, DISJOINT | PER_WORD),
    "sub-words": ("wikitext103-stride1024", "subword_perplexity", 4, DISJOINT | {"divided by": "sub-words"}),
    "one less": ("wikitext103-stride1024", "megatron", 2, DISJOINT | {"divided by": "original tokens less one"}),
    "raw": ("wikitext103-raw", "perplexity", 2, {"text": "none", "windows": FINE} | PER_WORD),
    "strict": ("lambada", "perplexity", 3, STRICT | {"number": "perplexity of the target"}),
    "lm-eval's": ("lambada-lm-eval", "perplexity", 3, STRICT | {"target": "after the last space"}),
    "last sub-word": ("lambada-last-token", "accuracy", 4, STRICT | {"target": "last sub-word", "number": "accuracy"}),
    "stop words": ("lambada-stopword-filter", "accuracy", 4, STRICT | {"stop words": "no answers"}),
    "plain text": ("lambada-standard", "perplexity", 3, STRICT | {"text": "lambada-standard"}),
    "sub-words right": ("lambada", "accuracy", 4, STRICT | {"number": "accuracy"}),
}
"""Protocol of ours, its number, digits after the point, what is to be named."""


@pytest.fixture(scope="module")
def directory(made_data: Path, made_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 that learnt a little of the text and of LAMBADA's answers."""
    torch.manual_seed(1)
    end = made_tokenizer.end_of_text
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=made_tokenizer.vocab_size, bos_token_id=end, eos_token_id=end,
            n_positions=CONTEXT, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        )
    )  # fmt: skip
    passages = [made_tokenizer.encode(line) for line in openai_passages_of(made_data)]
    ids = torch.tensor([*made_tokenizer.encode(detokenize_wikitext(wikitext(9, seed=1))), *itertools.chain(*passages)])
    answers = torch.tensor([passage[-CONTEXT:] for passage in passages[::3]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        starts = torch.randint(0, len(ids) - CONTEXT, (12,))
        rows = torch.stack([ids[start : start + CONTEXT] for start in starts])
        some = answers[torch.randint(0, len(answers), (24,))]
        labels = torch.cat([rows, some.masked_fill(torch.arange(CONTEXT) < CONTEXT - 3, -100)])
        optimizer.zero_grad()
        model(torch.cat([rows, some]), labels=labels).loss.backward()
        optimizer.step()
    path = tmp_path_factory.mktemp("identified") / "gpt2"
    model.save_pretrained(path)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(made_data / "gpt2-bpe" / name, path)
    return path


def openai_passages_of(data: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (data / TEST_SETS["lambada"].place).read_text().splitlines()]


@pytest.fixture
def identify(directory: Path, evaluated: Evaluated) -> Callable[..., Any]:
    def run(claimed: str, task: str = "wikitext103") -> Any:
        return evaluated("identify", "--ckpt", directory, "--claimed", claimed, "--task", task)

    return run


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_convention_is_named(
    name: str, nine_articles: str, directory: Path, evaluated: Evaluated, identify: Callable[..., Any]
) -> None:
    protocol, quantity, digits, convention = PLANTED[name]
    number = evaluated(protocol, "--ckpt", directory)[quantity]
    claimed = f"{number['adjusted ppl'] if isinstance(number, dict) else number:.{digits}f}"
    identified = identify(claimed, protocol.partition("-")[0])
    assert any(convention.items() <= match["axes"].items() for match in identified["matches"]), identified["nearest"]
    assert all(f"{match['value']:.{digits}f}" == claimed for match in identified["matches"])
    off = identify(f"{float(claimed) * 1.31:.{digits}f}", protocol.partition("-")[0])
    assert not any(convention.items() <= match["axes"].items() for match in off["matches"])
    nearest = [abs(each["value"] - 1.31 * float(claimed)) for each in off["nearest"]]
    assert nearest == sorted(nearest)


def harness_wikitext(text: str, model: Any, tokenizer: Any, where: Path) -> float:
    """lm-evaluation-harness's rolling log-likelihood with its own Hugging Face model."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer

    task = {
        "task": "local_wikitext", "output_type": "loglikelihood_rolling", "doc_to_text": "",
        "doc_to_target": wikitext_detokenizer, "process_results": process_results,
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    }  # fmt: skip
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8, max_length=CONTEXT, device="cpu")
    pages = [{"page": page} for page in lm_eval_documents(text)]
    return float(harness_metrics(theirs, task, pages, where)["word_perplexity,none"])


def transformers_recipe(text: str, model: Any, tokenizer: Any, where: Path) -> float:
    """Its stride is half of the context."""
    return strided_perplexity(text, model, tokenizer, CONTEXT)


def plain_loop(text: str, model: Any, tokenizer: Any, where: Path) -> float:
    """Chunks of the context of the text as it stands, unknown words left out: what scripts do."""
    ids = torch.tensor(tokenizer(text.replace("<unk>", ""))["input_ids"])
    losses, count = 0.0, 0
    for chunk in ids.split(CONTEXT):
        if len(chunk) > 1:
            with torch.no_grad():
                losses += model(chunk[None], labels=chunk[None]).loss.item() * (len(chunk) - 1)
            count += len(chunk) - 1
    return math.exp(losses / count)


@pytest.mark.parametrize(
    ("program", "digits", "convention"),
    [
        (harness_wikitext, 1, {"text": MEGATRON, "joined": "by document after end-of-text",
                               "windows": "disjoint, the last extended to the left", "divided by": "lm-eval words"}),
        (transformers_recipe, 3, {"text": "rows-by-blank-lines", "windows": "overlapping by half, target inside",
                                  "divided by": "transformers labels"}),
        (plain_loop, 3, {"text": "none", "unknown": "left out", "windows": "disjoint, the token after each not scored",
                         "divided by": "sub-words"}),
    ],
)  # fmt: skip
def test_what_another_program_printed_is_identified(
    program: Callable[..., float], digits: int, convention: dict[str, str],
    nine_articles: str, directory: Path, identify: Callable[..., Any], tmp_path: Path,
) -> None:  # fmt: skip
    pytest.importorskip("accelerate")
    model = transformers.GPT2LMHeadModel.from_pretrained(directory).eval()
    tokenizer = transformers.GPT2TokenizerFast.from_pretrained(directory)
    claimed = f"{program(nine_articles, model, tokenizer, tmp_path / 'pages.jsonl'):.{digits}f}"
    matches = identify(claimed)["matches"]
    assert any(convention.items() <= match["axes"].items() for match in matches), (claimed, matches)


@pytest.mark.parametrize("claimed", ["many", "-3", "0", "inf", "nan"])
def test_a_claim_that_is_no_number_is_refused(
    claimed: str, directory: Path, nine_articles: str, mlm_eval: Command
) -> None:
    assert "the claim" in mlm_eval("identify", "--ckpt", directory, f"--claimed={claimed}", ends=2).err
