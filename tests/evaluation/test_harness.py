"""lm-evaluation-harness with this engine as its model: Megatron-LM's protocols, and its own stock
tasks."""

import json
import logging
import shutil
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.lineage.errors import BadInput
from tests.commands import Command
from tests.evaluation.conftest import Evaluated

transformers = pytest.importorskip("transformers")
lm_eval = pytest.importorskip("lm_eval")

STOCK = Path(lm_eval.__file__).parent / "tasks"
CONTEXT = 64


@pytest.fixture(autouse=True)
def no_closed_streams() -> None:
    """Forget handlers of an earlier test, whose standard error is closed: lm_eval logs to the one
    that was there when it was imported first."""
    named = (logging.getLogger(name) for name in logging.root.manager.loggerDict)
    for logger in (logging.root, *named):
        for handler in list(logger.handlers):
            if getattr(getattr(handler, "stream", None), "closed", False):
                logger.removeHandler(handler)


@pytest.fixture(scope="module")
def directory(
    made_data: Path, made_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    torch.manual_seed(2)
    end = made_tokenizer.end_of_text
    config = transformers.GPT2Config(
        vocab_size=made_tokenizer.vocab_size,
        bos_token_id=end,
        eos_token_id=end,
        n_positions=CONTEXT,
        n_embd=32,
        n_layer=2,
        n_head=2,
        initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("harness") / "gpt2"
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(made_data / "gpt2-bpe" / name, path)
    return path


def test_the_installed_package_offers_its_model() -> None:
    from mlm_repro.evaluation.harness_model import Model

    (offered,) = entry_points(group="lm_eval.models", name="mlm")
    assert offered.load() is Model
    assert issubclass(Model, lm_eval.api.model.LM)


def test_megatron_s_protocols_give_mlm_eval_s_printed_numbers(
    nine_articles: str, directory: Path, mlm_eval: Command, evaluated: Evaluated
) -> None:
    arguments = (
        "--model",
        "mlm",
        "--model_args",
        f"pretrained={directory},workers=1",
        "--batch_size",
        "auto",
    )
    printed = mlm_eval("harness", *arguments, "--tasks", "megatron_wikitext103", ends=0).out
    assert "|Tasks|Version|Filter|n-shot|Metric|" in printed.replace(" ", "")
    perplexity, cloze = (
        evaluated(name, "--ckpt", directory) for name in ("wikitext103", "lambada")
    )
    rows = {
        row[5]: row[7]
        for line in printed.splitlines()
        if len(row := line.replace(" ", "").split("|")) > 8
    }
    expected = {
        "word_perplexity": perplexity["perplexity"],
        "adjusted_perplexity": perplexity["megatron"]["adjusted ppl"],
    }
    for name, value in expected.items():
        assert len(decimals := rows[name].partition(".")[2]) >= 1
        assert rows[name] == f"{value:.{len(decimals)}f}"

    from mlm_repro.evaluation.harness_model import TASK_FILES, Model

    manager = lm_eval.tasks.TaskManager(include_path=str(TASK_FILES), include_defaults=False)
    model = Model(str(directory), workers=1)
    done = lm_eval.simple_evaluate(
        model, tasks=["megatron_lambada"], task_manager=manager, bootstrap_iters=0
    )
    found = done["results"]["megatron_lambada"]
    assert found["acc,none"] == cloze["accuracy"]
    assert found["perplexity,none"] == pytest.approx(cloze["perplexity"], rel=1e-12)


def test_a_longest_input_below_one_token_is_refused(directory: Path) -> None:
    from mlm_repro.evaluation.harness_model import Model

    for none in (0, -8):
        with pytest.raises(BadInput, match=f"the longest input is {none} tokens: give at least 1"):
            Model(str(directory), workers=1, max_length=none)


def questions() -> list[dict[str, Any]]:
    """Rows with the columns of all three tasks."""
    return [
        {
            "question": f"Which word follows {word}?",
            "answer": f"It is {word}. #### {number}",
            "answerKey": "AB"[number % 2],
            "choices": {"text": [f"{word} and", "another word"], "label": ["A", "B"]},
            "page": f" = {word} = \n a page of {word} , " * 20,
        }
        for number, word in enumerate(("cat", "river", "old hills", "Łódź", "green"))
    ]


@pytest.mark.parametrize("name", ["arc/arc_easy", "gsm8k/gsm8k", "wikitext/wikitext"])
def test_stock_tasks_give_what_its_own_model_gives(
    name: str, directory: Path, tmp_path: Path
) -> None:
    """`loglikelihood`, `generate_until` and `loglikelihood_rolling`, on rows of a local file."""
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks._yaml_loader import load_yaml

    from mlm_repro.evaluation.harness_model import Model

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in questions()))
    task = load_yaml(STOCK / f"{name}.yaml", resolve_func=True)
    task = {
        key: value
        for key, value in task.items()
        if key not in ("dataset_name", "tag", "fewshot_config")
    } | {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "training_split": None,
        "validation_split": None,
        "fewshot_split": None,
        "num_fewshot": 0,
    }
    if "generation_kwargs" in task:
        task["generation_kwargs"] |= {"max_gen_toks": 12, "until": ["\n", "ing"]}
    tokenizer = transformers.GPT2TokenizerFast.from_pretrained(directory)
    model = transformers.GPT2LMHeadModel.from_pretrained(directory).eval()
    theirs = HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=CONTEXT, device="cpu"
    )
    answers: list[Any] = []
    for one in (Model(str(directory), workers=1), theirs):
        manager = lm_eval.tasks.TaskManager(include_defaults=False)
        done = lm_eval.simple_evaluate(
            one, tasks=[dict(task)], task_manager=manager, bootstrap_iters=0
        )
        (samples,) = done["samples"].values()
        answers.append(([sample["resps"] for sample in samples], done["results"][task["task"]]))
    (ours, our_results), (others, their_results) = answers
    flat = [torch.utils._pytree.tree_leaves(each) for each in (ours, others)]
    assert len(flat[0]) == len(flat[1]) >= len(questions())
    for mine, other in zip(*flat, strict=True):
        assert mine == (pytest.approx(other, rel=1e-4) if isinstance(other, float) else other)
    assert our_results == {
        k: pytest.approx(v, rel=1e-4) if isinstance(v, float) else v
        for k, v in their_results.items()
    }
