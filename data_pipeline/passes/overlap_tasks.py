"""The n-gram overlap of a whole corpus with test sets, shard by shard."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_pipeline.config import DataConfig
from data_pipeline.contamination.overlap import OverlapCounts, count_overlap, overlap
from data_pipeline.document import Document
from data_pipeline.reading.pieces import Piece, choose_shard_bytes
from data_pipeline.reading.readers import Limits, read_pieces
from data_pipeline.reading.sources import OpenedSources
from data_pipeline.work.tasks import Counts, Settings
from data_pipeline.work.workspace import Job, Workspace
from lineage.atomic import write_json
from lineage.errors import BadInput

FOUND = "found.txt"
RESULT = "overlap.json"


def measure_overlap(
    config: DataConfig, sources: OpenedSources, test_sets: dict[str, Path], workspace: Workspace, directory: Path
) -> None:
    """Write `overlap.json`: for each test set the share of its n-grams that the sources contain."""
    shards = sources.shards(workspace, choose_shard_bytes(config.shard_bytes, sources.total_bytes))
    words = config.overlap.ngram_words
    results: dict[str, Any] = {}
    for name, path in test_sets.items():
        fixed = {"limits": asdict(config.sources.limits), "test_set": str(path), "words": words}
        jobs: list[Job] = [({**fixed, "pieces": [piece.to_json() for piece in shard]}, ()) for shard in shards]
        counted = workspace.all(f"overlap-{len(results)}", count_shard, jobs, f"overlap with {name}")
        counts = OverlapCounts(0, frozenset())
        for number, each in enumerate(counted.counts):
            lines = (counted.task(number).path / FOUND).read_text(encoding="utf-8").split("\n")[:-1]
            counts = counts.merge(OverlapCounts(each["texts"], frozenset(lines)))
        if not counts.texts:
            raise BadInput(f"the corpus is empty: {sources.describe()} gave no documents")
        measured = overlap(counts, path, words)
        results[name] = {
            "texts": measured.texts,
            "percent": measured.occurrences.percent,
            "occurrences": asdict(measured.occurrences),
            "distinct": asdict(measured.distinct),
            "documents": [[share.ngrams, share.found] for share in measured.documents],
        }
    write_json(directory / RESULT, {"source": sources.describe(), "ngram_words": words, "test_sets": results})


def count_shard(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """The n-grams of the test set that a shard of the input contains."""
    pieces = [Piece(**piece) for piece in settings["pieces"]]

    def texts() -> Iterator[str]:
        for found in read_pieces(pieces, Limits(**settings["limits"])):
            if isinstance(found, Document):
                yield found.text

    counts = count_overlap(texts(), Path(settings["test_set"]), settings["words"])
    (directory / FOUND).write_text("".join(f"{ngram}\n" for ngram in sorted(counts.found)), encoding="utf-8")
    return {"texts": counts.texts}
