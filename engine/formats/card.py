"""The model card of an export (README.md), and its results as the Hugging Face hub takes them (`.eval_results/`)."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from data_pipeline.files import DATASET, DataCard, trained_datasets
from engine.checkpoint.checkpoint import LoadedCheckpoint
from engine.config import RunConfig
from engine.costs import parameter_count
from engine.formats import read_ours
from evaluation.schema import ClozeResult, Result
from lineage.atomic import write_json, write_text
from lineage.chain import LINEAGE
from lineage.config import parse_config, to_toml
from lineage.errors import BadInput, DataMissing
from lineage.files import parse_document, read_document, read_object, read_values
from lineage.numbers import markdown_cell
from lineage.run import MANIFEST, RunDirectory

CARD, RESULTS = "README.md", ".eval_results"


def read_results(paths: Sequence[Path], loaded: LoadedCheckpoint) -> list[Result]:
    """Results that `mlm-eval --json` wrote. Raises BadInput for those of another checkpoint."""
    results = []
    for path in paths:
        values = read_values(path)
        several = values.get("results") if isinstance(values, dict) else None
        for each in several.values() if isinstance(several, dict) else [values]:
            results.append(parse_document(each, Result, str(path)))
            if (digest := results[-1].checkpoint_digest) != loaded.digest:
                raise BadInput(f"{path} is of checkpoint {digest[:16]}, not of {loaded.directory}")
    return results


def write_card(directory: Path, loaded: LoadedCheckpoint, results: Sequence[Result]) -> None:
    """Write the card: architecture, data, recipe, results, digests; and a file of results for each test on the hub."""
    from huggingface_hub import EvalResult, EvalResultEntry, ModelCardData, eval_result_entries_to_yaml

    described, lineage, origin = (
        read_object(path) if (path := loaded.directory / file).is_file() else {}
        for file in ("config.json", LINEAGE, "origin.json")
    )
    name, twin = read_ours(described, directory.name, loaded.directory / "config.json")
    made_of = lineage.get("parents") if lineage else origin.get("files")
    inputs = ({"run": lineage.get("run")} if lineage else {}) | (made_of if isinstance(made_of, dict) else {})
    scores = [(result, *_score(result)) for result in results]
    places = [result.data_repository.rpartition("/")[::2] for result in results]
    data = ModelCardData(
        model_name=name,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["gpt2", "megatron-lm"],
        eval_results=[
            EvalResult(task_type="text-generation", dataset_type=repository or "text",
                       dataset_name=result.task, dataset_config=subset or None,
                       metric_type=metric, metric_value=value, metric_name=f"{result.task} {metric}")
            for (result, metric, value), (repository, subset) in zip(scores, places, strict=True)
        ] or None,
    )  # fmt: skip
    config = loaded.config
    lines = [
        f"A GPT-2 of {parameter_count(config):,} parameters, trained as Megatron-LM trains it.",
        "It is a shrunk twin of a published model: its numbers are scaled ones." if twin else "",
        "## Architecture",
        _table(("", ""), [("layers", config.num_layers), ("hidden size", config.hidden_size),
                          ("attention heads", config.num_heads), ("context", config.seq_length),
                          ("vocabulary", config.vocab_size)]),
        *(_training(loaded.directory, lineage) if lineage else ()),
        "## Evaluation" if scores else "",
        _table(("protocol", "kind", "metric", "value", "recipe"),
               [(result.task, result.kind + ", partial" * result.partial, metric, f"{value:.6g}", result.protocol)
                for result, metric, value in scores]) if scores else "",
        "## Lineage",
        _table(("", "SHA-256"), [("checkpoint", loaded.digest), *inputs.items()]),
    ]  # fmt: skip
    write_text(
        directory / CARD, f"---\n{data}\n---\n\n# {markdown_cell(name)}\n\n" + "\n\n".join(filter(None, lines)) + "\n"
    )
    for (result, metric, value), (repository, subset) in zip(scores, places, strict=True):
        if repository:
            entry = EvalResultEntry(repository, subset, value, notes=f"{metric}; {result.protocol}; {result.kind}")
            (directory / RESULTS).mkdir(exist_ok=True)
            file = re.sub(r"[^\w-]", "-", result.task)
            write_json(directory / RESULTS / f"{file}.yaml", eval_result_entries_to_yaml([entry]))


def _score(result: Result) -> tuple[str, float]:
    return ("accuracy", result.accuracy) if isinstance(result, ClozeResult) else ("perplexity", result.perplexity)


def _training(checkpoint: Path, lineage: dict[str, Any]) -> list[str]:
    """The data and the recipe of the run that the checkpoint lies in; nothing where it lies in none."""
    run = checkpoint.parent.parent
    if not (run / MANIFEST).is_file() or (manifest := RunDirectory.open(run).manifest).get("identity") != lineage.get(
        "run"
    ):
        return []
    rows = []
    with suppress(DataMissing):
        for dataset, weight in trained_datasets(run):
            card = read_document(dataset / DATASET, DataCard)
            split = card.splits["train"]
            rows.append((card.name, f"{weight:.3g}", f"{split.documents:,}", f"{split.tokens:,}", card.source))
    config = parse_config(manifest["config"] | {"data": {}}, RunConfig, str(run / MANIFEST))
    return ["## Data" * bool(rows), _table(("dataset", "weight", "documents", "tokens", "source"), rows) * bool(rows),
            "## Recipe", f"```toml\n{to_toml(config).strip()}\n```"]  # fmt: skip


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(markdown_cell(str(cell)) for cell in line) + " |" for line in lines)
