"""Shards of given texts after the first two passes, without files to read and without a
tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlm_repro.data_pipeline.config import DeduplicateConfig
from mlm_repro.data_pipeline.document import Document
from mlm_repro.data_pipeline.passes.measure import measure
from mlm_repro.data_pipeline.work.document_shard import DocumentWriter
from mlm_repro.data_pipeline.work.workspace import Finished, Job, Workspace


def write_texts(settings: dict[str, Any], inputs: list[Path], directory: Path) -> dict[str, Any]:
    with DocumentWriter(directory) as writer:
        for number, text in enumerate(settings["texts"]):
            writer.append(Document(str(number), text))
    return {"documents": len(settings["texts"])}


def measured_shards(
    workspace: Workspace, texts: Sequence[str], of_shard: int, config: DeduplicateConfig | None
) -> tuple[Finished, Finished]:
    """The texts after `prepare` and `measure`, so many in a shard."""
    parts = [texts[start : start + of_shard] for start in range(0, len(texts), of_shard)]
    prepared = workspace.all("prepare", write_texts, [({"texts": part}, ()) for part in parts])
    section = config and {"bands": config.banding[0], "rows": config.banding[1], "min_recall": 0}
    settings = {
        "filters": [],
        "deduplicate": section,
        "decontaminate": None,
        "test_sets": [],
        "tokenizer": None,
    }
    jobs: list[Job] = [(settings, (prepared.task(number),)) for number in range(len(parts))]
    return prepared, workspace.all("measure", measure, jobs)
