"""The model card of an export: README.md, with results in the header that the Hugging Face hub reads."""

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
from lineage.atomic import write_text
from lineage.chain import LINEAGE
from lineage.config import parse_config, to_toml
from lineage.errors import BadInput, DataMissing
from lineage.files import parse_document, read_document, read_object, read_values
from lineage.numbers import markdown_cell
from lineage.run import MANIFEST, RunDirectory

CARD = "README.md"


def read_results(paths: Sequence[Path], loaded: LoadedCheckpoint) -> list[Result]:
    """Results that `mlm-eval --json` wrote. Raises BadInput for results of another checkpoint."""
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
    """Write the card: architecture, data, recipe, results, digests."""
    from huggingface_hub import EvalResult, ModelCardData

    described, lineage, origin = (
        read_object(path) if (path := loaded.directory / file).is_file() else {}
        for file in ("config.json", LINEAGE, "origin.json")
    )
    name, twin = read_ours(described, directory.name, loaded.directory / "config.json")
    made_of = lineage.get("parents") if lineage else origin.get("files")
    inputs = ({"run": lineage.get("run")} if lineage else {}) | (made_of if isinstance(made_of, dict) else {})
    rows, entries = [], []
    for result in results:
        metric, value = _score(result)
        kind = result.kind + ", partial" * result.partial
        rows.append((result.task, kind, metric, f"{value:.6g}", result.protocol))
        repository, _, subset = result.data_repository.rpartition("/")
        entries.append(EvalResult(
            task_type="text-generation", dataset_type=repository or "text", dataset_name=result.task,
            dataset_config=subset or None, metric_type=metric, metric_value=value,
            metric_name=f"{result.task} {metric}",
        ))  # fmt: skip
    header = ModelCardData(
        model_name=name, library_name="transformers", pipeline_tag="text-generation", tags=["gpt2", "megatron-lm"],
        eval_results=entries or None,
    )  # fmt: skip
    config = loaded.config
    sizes = [("layers", config.num_layers), ("hidden size", config.hidden_size), ("attention heads", config.num_heads),
             ("context", config.seq_length), ("vocabulary", config.vocab_size)]  # fmt: skip
    parts = [
        f"---\n{header}\n---",
        f"# {markdown_cell(name)}",
        f"A GPT-2 of {parameter_count(config):,} parameters, trained as Megatron-LM trains it.",
        *(["It is a shrunk twin of a published model: its numbers are scaled ones."] if twin else []),
        "## Architecture", _table(("", ""), sizes),
        *(_training(loaded.directory, lineage) if lineage else []),
        *(["## Evaluation", _table(("protocol", "kind", "metric", "value", "recipe"), rows)] if rows else []),
        "## Lineage", _table(("", "SHA-256"), [("checkpoint", loaded.digest), *inputs.items()]),
    ]  # fmt: skip
    write_text(directory / CARD, "\n\n".join(parts) + "\n")


def _score(result: Result) -> tuple[str, float]:
    return ("accuracy", result.accuracy) if isinstance(result, ClozeResult) else ("perplexity", result.perplexity)


def _training(checkpoint: Path, lineage: dict[str, Any]) -> list[str]:
    """Data and recipe of the run that contains the checkpoint; nothing if no run does."""
    run = checkpoint.parent.parent
    manifest = RunDirectory.open(run).manifest if (run / MANIFEST).is_file() else {}
    if not manifest or manifest.get("identity") != lineage.get("run"):
        return []
    rows = []
    with suppress(DataMissing):
        for dataset, weight in trained_datasets(run):
            card = read_document(dataset / DATASET, DataCard)
            split = card.splits["train"]
            rows.append((card.name, f"{weight:.3g}", f"{split.documents:,}", f"{split.tokens:,}", card.source))
    config = parse_config(manifest["config"] | {"data": {}}, RunConfig, str(run / MANIFEST))
    data = ["## Data", _table(("dataset", "weight", "documents", "tokens", "source"), rows)] if rows else []
    return [*data, "## Recipe", f"```toml\n{to_toml(config).strip()}\n```"]


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(markdown_cell(str(cell)) for cell in line) + " |" for line in lines)
