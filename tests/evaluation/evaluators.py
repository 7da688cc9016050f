"""Evaluators that others wrote, on the oracle: `python -m tests.evaluation.evaluators` writes
docs/oracle.md's table.

lm-evaluation-harness, this package, and llama.cpp's program where it is on PATH run as they are.
transformers' recipe, evaluate's metric, and llama.cpp's program elsewhere, are restated from their
sources, on transformers' model.
"""

import json
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mlm_repro.evaluation.conventions.identify import find
from mlm_repro.evaluation.conventions.oracle import SECOND, read_table, write_oracle
from mlm_repro.evaluation.conventions.table import OWN, TWICE
from tests.commands import call

PAGE = Path(__file__).parents[2] / "docs" / "oracle.md"
BEGIN, END = "<!-- evaluators -->\n", "<!-- end -->"
CONTEXT = 32
LLAMA_CPP = shutil.which("llama-perplexity")


class Evaluator(NamedTuple):
    """A program with a number of it on the oracle, and what is to be named."""

    name: str
    package: str
    text: str
    unit: str
    run: Callable[[Path], float]
    axes: dict[str, str]
    digits: int = 7
    folder: str = ""
    """Of the oracle's checkpoint, in its directory."""

    def find(self, oracle: Path, number: str) -> list[dict[str, str]]:
        """The conventions of its number."""
        return find(f"{self.text}={number}", read_table(oracle / self.folder), self.unit).matches


def load(oracle: Path, folder: str = "") -> tuple[Any, Any]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(oracle / folder / "model").eval()
    return model, transformers.AutoTokenizer.from_pretrained(oracle / folder / "model")


def harness(task: str, metric: str, folder: str = "") -> Callable[[Path], float]:
    def run(oracle: Path) -> float:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        before = Path.cwd()
        os.chdir(oracle)
        try:
            model = HFLM(pretrained=str(Path(folder, "model")), batch_size=4, device="cpu")
            manager = TaskManager(include_path="tasks", include_defaults=False)
            done = simple_evaluate(model, tasks=[task], task_manager=manager, bootstrap_iters=0)
        finally:
            os.chdir(before)
        return float(done["results"][task][f"{metric},none"])

    return run


def strided(oracle: Path, folder: str = "") -> float:
    """transformers, docs/source/en/perplexity.md."""
    model, tokenizer = load(oracle, folder)
    ids = tokenizer("\n\n".join(documents(oracle)), return_tensors="pt").input_ids
    nll_sum, n_tokens, previous_end = 0.0, 0, 0
    for begin in range(0, ids.size(1), CONTEXT // 2):
        end = min(begin + CONTEXT, ids.size(1))
        labels = ids[:, begin:end].clone()
        labels[:, : -(end - previous_end)] = -100
        with torch.no_grad():
            loss = model(ids[:, begin:end], labels=labels).loss
        valid = int((labels != -100).sum()) - 1
        nll_sum, n_tokens, previous_end = nll_sum + loss.item() * valid, n_tokens + valid, end
        if end == ids.size(1):
            break
    return math.exp(nll_sum / n_tokens)


def mean_perplexity(oracle: Path) -> float:
    """evaluate, metrics/perplexity/perplexity.py with add_start_token; it refuses empty texts:
    these are left out."""
    model, tokenizer = load(oracle)
    perplexities = []
    for text in filter(None, documents(oracle)):
        ids = tokenizer(
            text, add_special_tokens=False, truncation=True, max_length=CONTEXT - 1
        ).input_ids
        row = torch.tensor([[tokenizer.bos_token_id, *ids]])
        with torch.no_grad():
            logits = model(row).logits
        perplexities.append(
            torch.nn.functional.cross_entropy(logits[0, :-1], row[0, 1:]).exp().item()
        )
    return sum(perplexities) / len(perplexities)


def chunks(oracle: Path) -> float:
    """llama.cpp, tools/perplexity/perplexity.cpp: the second half of each chunk, whole chunks
    only."""
    if LLAMA_CPP:
        words = [
            "-m",
            oracle / "model.gguf",
            "-f",
            oracle / "texts" / "all.txt",
            "-c",
            str(CONTEXT),
        ]
        ran = subprocess.run(
            [LLAMA_CPP, *words], capture_output=True, text=True, check=True, timeout=60
        )
        return float((ran.stdout + ran.stderr).partition("Final estimate: PPL = ")[2].split()[0])
    model, tokenizer = load(oracle)
    ids = tokenizer(
        (oracle / "texts" / "all.txt").read_bytes().decode(), split_special_tokens=True
    ).input_ids
    nll, count, first = 0.0, 0, CONTEXT // 2
    for chunk in range(len(ids) // CONTEXT):
        row = torch.tensor(ids[chunk * CONTEXT : (chunk + 1) * CONTEXT])
        with torch.no_grad():
            logits = model(row[None]).logits[0]
        for j in range(first, CONTEXT - 1):
            nll, count = nll - logits[j].log_softmax(0)[row[j + 1]].item(), count + 1
    return math.exp(nll / count)


def ours(quantity: str) -> Callable[[Path], float]:
    def run(oracle: Path) -> float:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "result.json"
            verb, text = (
                ("cloze", "passages.jsonl") if quantity == "accuracy" else ("perplexity", "all.txt")
            )
            words = [
                oracle / "texts" / text,
                "--ckpt",
                oracle / "model",
                "--set",
                "workers=1",
                "--json",
                target,
            ]
            call({}, "mlm-eval", verb, *words, ends=0)
            return float(json.loads(target.read_text())[quantity])

    return run


def documents(oracle: Path, text: str = "all") -> list[str]:
    return [
        json.loads(line)["text"]
        for line in (oracle / "texts" / f"{text}.jsonl").read_text().splitlines()
    ]


APART = {"documents": "separate", "first": "scored after end-of-text"}
WIKITEXT = APART | {"text": "detokenised", "windows": "disjoint, the last extended to the left"}
SLIDING = {"documents": "one text", "windows": "a 32nd apart"}
LM_EVAL = "lm-evaluation-harness"
EVALUATORS = (
    Evaluator(
        f"{LM_EVAL}, wikitext",
        "lm_eval",
        "wikitext",
        "ppl",
        harness("oracle_wikitext", "word_perplexity"),
        WIKITEXT | {"average": "lm-eval words"},
    ),
    Evaluator(
        f"{LM_EVAL}, wikitext",
        "lm_eval",
        "wikitext",
        "bits-per-byte",
        harness("oracle_wikitext", "bits_per_byte"),
        WIKITEXT | {"average": "bytes"},
    ),
    Evaluator(
        f"{LM_EVAL}, lambada",
        "lm_eval",
        "passages",
        "ppl",
        harness("oracle_lambada", "perplexity"),
        {"target": "what follows the last space", "average": "targets"},
    ),
    Evaluator(
        "transformers, strided recipe",
        "transformers",
        "all",
        "ppl",
        strided,
        {
            "documents": "one text",
            "windows": "overlapping by half, target inside",
            "literal": "a token",
            "average": "transformers' labels",
        },
    ),
    Evaluator(
        f"{LM_EVAL}, wikitext, second checkpoint",
        "lm_eval",
        "wikitext",
        "ppl",
        harness("oracle_wikitext", "word_perplexity", SECOND),
        WIKITEXT | {"first": TWICE, "average": "lm-eval words", "softmax": "all rows"},
        folder=SECOND,
    ),
    Evaluator(
        "transformers, strided recipe, second checkpoint",
        "transformers",
        "all",
        "ppl",
        partial(strided, folder=SECOND),
        {
            "documents": "one text",
            "first": OWN,
            "windows": "overlapping by half, target inside",
            "literal": "a token",
            "average": "transformers' labels",
            "softmax": "all rows",
        },
        folder=SECOND,
    ),
    Evaluator(
        "evaluate, perplexity (restated)",
        "evaluate",
        "all",
        "ppl",
        mean_perplexity,
        APART | {"windows": "cut at the right", "average": "perplexities of documents"},
    ),
    Evaluator(
        "llama.cpp, perplexity",
        "",
        "all",
        "ppl",
        chunks,
        {
            "windows": "disjoint, the second half of each scored",
            "literal": "spelled out",
            "average": "sub-words",
        },
        digits=5,
    ),
    Evaluator(
        "mlm-eval perplexity",
        "mlm-repro",
        "all",
        "ppl",
        ours("perplexity"),
        SLIDING | {"average": "original tokens"},
    ),
    Evaluator(
        "mlm-eval perplexity",
        "mlm-repro",
        "all",
        "bits-per-byte",
        ours("bits_per_byte"),
        SLIDING | {"average": "bytes"},
    ),
    Evaluator(
        "mlm-eval cloze",
        "mlm-repro",
        "passages",
        "accuracy",
        ours("accuracy"),
        {"target": "the last word", "average": "accuracy"},
    ),
)
SHOWN = ("text", "documents", "first", "literal", "windows", "target", "softmax", "average")


def llama_cpp_version() -> str:
    if not LLAMA_CPP:
        return "restated"
    ran = subprocess.run(
        [LLAMA_CPP, "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    return (ran.stdout + ran.stderr).splitlines()[0].partition("version: ")[2]


def table(oracle: Path) -> str:
    """A row for each number: evaluator, version, text, number, and the convention that was
    identified."""
    rows = ["| evaluator | version | text | number | convention |", "|---|---|---|---|---|"]
    for each in EVALUATORS:
        number = f"{each.run(oracle):.{each.digits}g}"
        match = each.find(oracle, number)[0]
        says = "; ".join(match[axis] for axis in SHOWN if axis in match)
        release = version(each.package) if each.package else llama_cpp_version()
        rows.append(f"| {each.name} | {release} | {each.text} | {each.unit} {number} | {says} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        write_oracle(Path(place) / "oracle")
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        written = table(Path(place) / "oracle")
    PAGE.write_text(before + BEGIN + written + END + rest.partition(END)[2], encoding="utf-8")
