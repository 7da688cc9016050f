"""Probes of a loaded model before its first number, in a few short forward passes, once for the
same weights.

They ask the model itself: does it see what it is to predict, does it answer alike twice, and is a
row in a batch and beside padding the row alone? A row is scored as every other, so packed weights
and the cut output layer are probed too.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mlm_repro.evaluation.protocol import Request
from mlm_repro.evaluation.scoring.scores import ScoringModel, describe, score
from mlm_repro.lineage.atomic import parse_json
from mlm_repro.lineage.digest import sha256_json
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.remembered import recall, remember

LENGTH = 16
"""Inputs of a probed row; another has half of them and stands beside padding."""
SHORTEST = 4
ROUNDING, ROUNDING_OF_HALF = 1e-5, 0.02
"""Most that log-probabilities move from rounding alone, in 32 bits and in 16."""
OF_ITS_OWN = 1e-3
"""Share of a token's effect on its own prediction that rounding stays below."""
IN_A_BATCH = 30
"""Factor by which products of another shape may move them further."""
Outcome = tuple[ScoringModel, str]
"""The model as it is to be scored, and a sentence on what was found."""


class Probed:
    """Log-probabilities of rows, made once for all probes: a row, one that ends otherwise, a short
    one, its first."""

    def __init__(self, model: ScoringModel) -> None:
        length = min(LENGTH, model.seq_length)
        ids = (np.arange(2 * length + 2, dtype=np.int64) * 7919 + 11) % model.vocab_size
        row = ids[: length + 1]
        other = ids[: length + 1].copy()
        other[-2] = (other[-2] + 1) % model.vocab_size
        short = ids[length + 1 :][: length // 2 + 1]
        self._requests = [Request(each, len(each) - 1) for each in (row, other, short, row[:2])]
        self.alone = self.scored(model, 1)
        self.together = self.scored(model, len(self._requests))
        row, other, _, first = self.alone
        self.moved = float(np.abs(row[:-2] - other[:-2]).max())
        """Largest change of an earlier log-probability by another last token."""
        self.moved_first = float(np.abs(row[0] - first[0]))
        """Change of the first log-probability by all later tokens."""
        effect = float(np.abs(row[-1] - other[-1]))
        self.allowed = max(
            ROUNDING_OF_HALF if model.dtype.itemsize < 4 else ROUNDING, OF_ITS_OWN * effect
        )

    def scored(self, model: ScoringModel, batch_size: int) -> list[np.ndarray]:
        """The rows' log-probabilities, made now."""
        scores = score(
            model,
            self._requests,
            batch_size,
            workers=1 if model.mesh.device.type == "cpu" else None,
        )
        return np.split(scores.log_probabilities, scores.starts[1:])


def is_repeatable(model: ScoringModel, probed: Probed) -> Outcome:
    """Compare what two rows begin with alike, and if that differs, the rows scored twice.

    Raises BadInput for a model that answers otherwise the second time.
    """
    if not probed.moved <= probed.allowed:
        again = _difference(probed.alone, probed.scored(model, 1))
        if not again <= probed.allowed:
            raise BadInput(
                f"the same tokens have log-probabilities that differ by {again:.2g} when scored"
                " twice"
            )
    return model, "the same tokens scored twice have the same log-probabilities"


def is_causal(model: ScoringModel, probed: Probed) -> Outcome:
    """Change the last input, or leave all but the first out: what is predicted before stays.

    Raises BadInput for a model that sees the future, if only within a prefix.
    """
    if not (probed.moved <= probed.allowed and probed.moved_first <= IN_A_BATCH * probed.allowed):
        raise BadInput(
            "it sees the tokens that it is to predict: later tokens move earlier log-probabilities"
            f" by {max(probed.moved, probed.moved_first):.2g}, so its perplexity would measure"
            " nothing"
        )
    return model, "a later token changes no earlier log-probability"


def is_row_by_row(model: ScoringModel, probed: Probed) -> Outcome:
    """Score rows alone and together, one beside padding. A model that differs gets one row at a
    time."""
    if not (moved := _difference(probed.alone, probed.together)) <= IN_A_BATCH * probed.allowed:
        said = (
            f"a row in a batch moves by {moved:.2g} from the row alone: one row at a time is scored"
        )
        return replace(model, is_alone=True), said
    if model.length_switch:
        said = (
            f"rows of up to {model.length_switch:,} inputs, which the model reads otherwise, are in"
            " batches apart"
        )
        return model, said
    return model, "a row in a batch, beside padding or not, is the row alone"


PROBES: dict[str, Callable[[ScoringModel, Probed], Outcome]] = {
    "repeatable": is_repeatable,
    "causal": is_causal,
    "row by row": is_row_by_row,
}


def probe(model: ScoringModel, weights: str) -> tuple[ScoringModel, dict[str, str]]:
    """The model as it is to be scored, and the outcome of each probe. Raises BadInput as they do.

    The outcomes are remembered for the digest `weights` and all else that scores depend on; rank
    0's memory counts.
    """
    checked: dict[str, str] = {}
    if min(model.seq_length, model.vocab_size) < SHORTEST:
        return model, checked
    asked = [ask.__qualname__ for ask in PROBES.values()]
    made_of = sha256_json([weights, describe(model), model.length_switch, asked])
    name = f"probes-{made_of[:32]}"
    if known := model.mesh.world.gather_objects(recall(name, made_of))[0]:
        checked, is_alone = parse_json(known)
        return replace(model, is_alone=is_alone), checked
    probed = Probed(model)
    for each, ask in PROBES.items():
        model, checked[each] = ask(model, probed)
    remember(name, made_of, json.dumps([checked, model.is_alone]).encode())
    return model, checked


def _difference(rows: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(row - other).max()) for row, other in zip(rows, others, strict=True))
