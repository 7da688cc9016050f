"""Two checkpoints on the same test: paired differences."""

import numpy as np

from evaluation.protocol import Losses
from evaluation.uncertainty import difference_standard_error, mean_standard_error
from lineage.config import Config
from lineage.errors import BadInput


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
        task=task, num_pairs=len(first.names), log_perplexity=float(values[1] - values[0]),
        log_perplexity_standard_error=error, accuracy=accuracy, accuracy_standard_error=accuracy_error,
    )  # fmt: skip
