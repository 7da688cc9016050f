"""SmolLM2 by other people's programs: `MLM_DATA_DIR=DIR python -m tests.evaluation.outside
results/smollm2`.

Writes transformers.jsonl, transformers' own loop over the windows of wikitext103-stride1024 with
the sum of each window's losses in nats, and lm-eval.json, what lm-evaluation-harness's own model
and lambada_openai give. Started again, it goes on.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from mlm_repro.data_pipeline.contamination.testsets import find_test_set
from mlm_repro.evaluation.models.places import SMOLLM2, place_of
from mlm_repro.evaluation.tasks.wikitext103 import MEGATRON, read_wikitext

WINDOW = 1024
PROMPTS = 8
"""Passages in one forward pass of lm-evaluation-harness."""


@torch.inference_mode()
def transformers_loop(directory: Path, gguf: str, text: str, out: Path) -> None:
    """Disjoint windows: the losses of a window by torch's float32 cross-entropy, and by a float64
    softmax."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, gguf_file=gguf, dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=gguf)
    ids = torch.tensor(tokenizer(text).input_ids)
    done = len(out.read_text().splitlines()) if out.exists() else 0
    with out.open("a") as file:
        for start in range(done * WINDOW, len(ids) - 1, WINDOW):
            window = ids[start : start + WINDOW + 1]
            logits = model(window[None, :-1], use_cache=False).logits[0]
            exact = -logits.double().log_softmax(-1).gather(1, window[1:, None])
            row = {
                "window": start // WINDOW,
                "scored": len(window) - 1,
                "float32": F.cross_entropy(logits, window[1:], reduction="none")
                .double()
                .sum()
                .item(),
                "float64": exact.sum().item(),
            }
            file.write(json.dumps(row) + "\n")
            file.flush()


def harness(directory: Path, gguf: str, passages: Path, answers: str | None) -> dict[str, Any]:
    """lambada_openai as it comes, but for the file that it reads."""
    source = Path(lm_eval.__file__).parent / "tasks" / "lambada" / "lambada_openai.yaml"
    task: dict[str, Any] = {
        "include": str(source),
        "task": "lambada_local",
        "tag": [],
        "dataset_path": "json",
        "dataset_name": None,
    }
    task["dataset_kwargs"] = {"data_files": {"test": str(passages)}}
    model = HFLM(
        pretrained=str(directory), gguf_file=gguf, dtype="float32", batch_size=PROMPTS, device="cpu"
    )
    with TemporaryDirectory() as folder:
        (Path(folder) / "lambada_local.yaml").write_text(json.dumps(task))
        manager = TaskManager(include_path=folder)
        found = lm_eval.simple_evaluate(
            model, tasks=["lambada_local"], task_manager=manager, use_cache=answers
        )
    measured = {
        key.removesuffix(",none"): value for key, value in found["results"]["lambada_local"].items()
    }
    return {
        "task": "lambada_openai",
        "packages": {name: version(name) for name in ("lm_eval", "transformers")},
    } | {key: measured[key] for key in ("acc", "acc_stderr", "perplexity", "perplexity_stderr")}


def main(folder: Path) -> None:
    """Write both files."""
    torch.set_num_threads(1)
    directory = place_of(Path(SMOLLM2))
    (gguf,) = (path.name for path in directory.glob("*.gguf"))
    text = read_wikitext("wikitext103", find_test_set("wikitext103")).text
    folder.mkdir(parents=True, exist_ok=True)
    measured = harness(directory, gguf, find_test_set("lambada"), str(folder / "answers"))
    (folder / "lm-eval.json").write_text(json.dumps(measured, indent=2) + "\n")
    transformers_loop(directory, gguf, MEGATRON.apply(text), folder / "transformers.jsonl")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
