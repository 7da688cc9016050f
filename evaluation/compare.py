"""Two checkpoints on the same test: paired differences, and the first window, tensor and weight that differ."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from engine.checkpoint.checkpoint import load_for_inference
from engine.compare.models import Agreement, compare_models, engine_model, transformers_model
from engine.formats.convert import is_huggingface
from engine.model.gpt2 import GPT2
from evaluation.checkpoints import native_checkpoint
from evaluation.protocol import Losses, Request
from evaluation.settings import Settings
from evaluation.uncertainty import difference_standard_error, mean_standard_error
from lineage.config import Config
from lineage.errors import BadInput
from lineage.progress import Progress


class Difference(Config):
    """Second checkpoint less the first, article by article or example by example."""

    task: str
    num_pairs: int
    log_perplexity: float
    """Below zero if the second predicts better."""
    log_perplexity_standard_error: float | None
    accuracy: float | None
    """None for a perplexity task."""
    accuracy_standard_error: float | None


def paired_difference(task: str, first: Losses, second: Losses) -> Difference:
    """The difference on the articles or examples. Raises BadInput if the two checkpoints have different ones."""
    if first.names != second.names:
        raise BadInput(
            f"{task}: the two checkpoints were not scored on the same parts of the text, since their contexts or "
            "vocabularies differ: compare them without --limit, on a text with articles"
        )
    values = [losses.nll.sum() / losses.weight.sum() for losses in (first, second)]
    accuracy = accuracy_error = None
    if first.correct is not None and second.correct is not None:
        change = second.correct.astype(np.float64) - first.correct
        accuracy, accuracy_error = float(change.mean()), mean_standard_error(change)
        error = mean_standard_error(second.nll - first.nll)
    else:
        error = difference_standard_error((first.nll, first.weight), (second.nll, second.weight))
    return Difference(
        task=task,
        num_pairs=len(first.names),
        log_perplexity=float(values[1] - values[0]),
        log_perplexity_standard_error=error,
        accuracy=accuracy,
        accuracy_standard_error=accuracy_error,
    )


def compare_windows(first: Path, second: Path, requests: Sequence[Request], settings: Settings) -> Agreement | None:
    """Walk windows in order until one differs; None unless both are GPT-2s of one shape."""
    models = []
    with ExitStack() as stack:
        for path in (first, second):
            native = stack.enter_context(native_checkpoint(path, settings.vocab, settings.heads))
            model = load_for_inference(native).model
            if not isinstance(model, GPT2):
                return None
            theirs = transformers_model(path, model.config) if is_huggingface(path) else None
            models.append(theirs or engine_model(model))
        reference, other = models
        shapes = [{name: tuple(weight.shape) for name, weight in model.weights().items()} for model in models]
        if shapes[0] != shapes[1] or reference.config.num_heads != other.config.num_heads:
            return None
        windows = [(request.tokens, request.num_scored) for request in requests]
        title = f"the same windows through {reference.program} and {other.program}"
        with Progress(title, len(windows), "windows") as progress:
            return compare_models(reference, other, windows, progress.advance)
