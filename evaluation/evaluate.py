"""Evaluating a checkpoint by a named protocol, from a directory to a result."""

import sys
import time
from pathlib import Path

from data_pipeline.testsets import find_test_set
from evaluation.cloze import StrictCloze
from evaluation.heldout import heldout_cloze, heldout_perplexity
from evaluation.lambada import lambada
from evaluation.models import EvaluatedCheckpoint, load_checkpoint
from evaluation.perplexity import SlidingPerplexity
from evaluation.protocol import ClozeResult, PerplexityResult, Provenance, Scores, Task
from evaluation.scoring import score
from evaluation.wikitext103 import wikitext103
from lineage.environment import describe_environment
from lineage.errors import DataMissing
from lineage.progress import Progress


def evaluate_wikitext103(
    checkpoint: Path, limit: int | None = None, batch_size: int | None = None, workers: int | None = None
) -> PerplexityResult:
    """Word-level perplexity on WikiText-103 of a checkpoint, or of a run's newest one.

    `limit` scores only that many windows. Where the test file cannot be had, the result is that of
    `heldout-perplexity` and says so. Raises DataMissing if there are no held-out documents either.
    """
    started = time.monotonic()
    evaluated = load_checkpoint(checkpoint)
    task = _wikitext103_or_heldout(evaluated, limit)
    scores = _score(task, evaluated, batch_size, workers)
    return task.result(scores, _provenance(evaluated, started))


def evaluate_lambada(
    checkpoint: Path, limit: int | None = None, batch_size: int | None = None, workers: int | None = None
) -> ClozeResult:
    """Strict accuracy on LAMBADA of a checkpoint, or of a run's newest one.

    `limit` scores only that many examples. Where the test file cannot be had, the result is that of
    `heldout-cloze` and says so. Raises DataMissing if there are no held-out documents either.
    """
    started = time.monotonic()
    evaluated = load_checkpoint(checkpoint)
    task = _lambada_or_heldout(evaluated, limit)
    scores = _score(task, evaluated, batch_size, workers)
    return task.result(scores, _provenance(evaluated, started))


def _wikitext103_or_heldout(evaluated: EvaluatedCheckpoint, limit: int | None) -> SlidingPerplexity:
    tokenizer, seq_length = evaluated.tokenizer, evaluated.model.seq_length
    try:
        path = find_test_set("wikitext103")
    except DataMissing as missing:
        dataset = _stand_in(evaluated, missing)
        return heldout_perplexity(dataset, tokenizer, seq_length, limit, reason=str(missing))
    return wikitext103(path, tokenizer, seq_length, limit)


def _lambada_or_heldout(evaluated: EvaluatedCheckpoint, limit: int | None) -> StrictCloze:
    tokenizer, seq_length = evaluated.tokenizer, evaluated.model.seq_length
    try:
        path = find_test_set("lambada")
    except DataMissing as missing:
        dataset = _stand_in(evaluated, missing)
        return heldout_cloze(dataset, tokenizer, seq_length, limit, reason=str(missing))
    return lambada(path, tokenizer, seq_length, limit)


def _stand_in(evaluated: EvaluatedCheckpoint, missing: DataMissing) -> Path:
    try:
        return evaluated.training_dataset()
    except DataMissing as also_missing:
        raise DataMissing(f"{missing}; and no held-out documents stand in, as {also_missing}") from also_missing


def _score(task: Task, evaluated: EvaluatedCheckpoint, batch_size: int | None, workers: int | None) -> Scores:
    if task.note:
        print(f"warning: {task.note}", file=sys.stderr)
    requests = task.requests
    with Progress(task.name, len(requests), task.unit) as progress:
        return score(evaluated.model, requests, batch_size, workers, progress.advance)


def _provenance(evaluated: EvaluatedCheckpoint, started: float) -> Provenance:
    return Provenance(
        kind=evaluated.kind,
        checkpoint=f"{evaluated.directory.parent.parent.name}/{evaluated.directory.name}",
        checkpoint_digest=evaluated.digest,
        tokenizer_digest=evaluated.tokenizer.digest,
        dtype=str(evaluated.model.dtype).removeprefix("torch."),
        seconds=time.monotonic() - started,
        environment=describe_environment(),
    )
