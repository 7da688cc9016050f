"""Probes of a loaded model before its first number, in a few short forward passes, once for the
same weights.

Does the model see the tokens that it predicts? Does it answer alike twice? Is a row in a batch and
beside padding equal to the row alone? Rows are scored as all others are, so packed weights and the
cut output layer are probed too.
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
"""Number of inputs of a probed row. A shorter row has half as many and is padded beside it."""
SHORTEST = 4
"""Smallest context and smallest vocabulary of a model that is probed."""
ROUNDING = 1e-5
"""Largest change of a log-probability by rounding alone in 32 bits."""
ROUNDING_OF_HALF = 0.02
"""Largest change of a log-probability by rounding alone in 16 bits."""
OF_ITS_OWN = 1e-3
"""Share of an input's effect on the next prediction: a change of a log-probability below this share
counts as rounding."""
IN_A_BATCH = 30
"""Factor on the tolerated rounding between a row alone and a row in a batch, whose matrix products
have other shapes."""
Outcome = tuple[ScoringModel, str]
"""Pair: the model as it will be scored, and a sentence on the outcome of the probe."""


class Probed:
    """Log-probabilities that a model gives four rows of tokens, computed once for all probes, when
    the object is made on every rank of the model's mesh: a row, the row with another last input, a
    short row, and the first row's first two tokens. The attributes `alone`, of rows scored one by
    one, and `together`, of rows in one batch, are each a list of an array [targets] for each row.
    `moved` is the largest change of an earlier log-probability by the other input, `moved_first`
    the change of the first one in the row of two tokens. `allowed`, computed for this model, is the
    largest change that counts as rounding between rows of one length, scored alone."""

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
        """Largest change of an earlier log-probability when the last input is another token."""
        self.moved_first = float(np.abs(row[0] - first[0]))
        """Change of the first log-probability when all later tokens are left out."""
        effect = float(np.abs(row[-1] - other[-1]))
        self.allowed = max(
            ROUNDING_OF_HALF if model.dtype.itemsize < 4 else ROUNDING, OF_ITS_OWN * effect
        )

    def scored(self, model: ScoringModel, batch_size: int) -> list[np.ndarray]:
        """Score the probe's four rows with `model` now, at most `batch_size` rows in a forward
        pass. Return a list of an array of natural log-probabilities, [targets], for each row, in
        the order in which the class names the rows. Every rank of the model's mesh calls it and
        gets the whole list."""
        scores = score(
            model,
            self._requests,
            batch_size,
            workers=1 if model.mesh.device.type == "cpu" else None,
        )
        return np.split(scores.log_probabilities, scores.starts[1:])


def is_repeatable(model: ScoringModel, probed: Probed) -> Outcome:
    """Probe: check that `model` gives the same tokens, scored twice, the same log-probabilities but
    for rounding. Nothing is scored if the two rows in `probed` that differ in the last input alone
    agree before it; else all rows of `probed` are scored a second time and compared. Every rank of
    the model's mesh calls it. Return a pair: the model unchanged, and a sentence that it is
    repeatable.

    Raises BadInput if the second scoring differs by more than rounding, or if either has a NaN.
    """
    # Two rows with one beginning are two answers to it already. A second scoring is needed only if
    # they differ, which saves a pass for every other model.
    if not probed.moved <= probed.allowed:
        difference = _difference(probed.alone, probed.scored(model, 1))
        if not difference <= probed.allowed:
            raise BadInput(
                "it is not repeatable: the same tokens, scored twice, have"
                f" log-probabilities that differ by {difference:.2g}: mend the model, which may"
                " draw random numbers or compute NaN"
            )
    return model, "the same tokens scored twice have the same log-probabilities"


def is_causal(model: ScoringModel, probed: Probed) -> Outcome:
    """Probe: check by the log-probabilities in `probed`, without a run of the model, that
    predictions move by at most `probed.allowed` when a later input changes, and by at most
    IN_A_BATCH times as much when all later inputs are left out. Return a pair: the model unchanged,
    and a sentence that it is causal.

    Raises BadInput for a model whose predictions depend on later inputs, if only within a
    prefix.
    """
    if not (probed.moved <= probed.allowed and probed.moved_first <= IN_A_BATCH * probed.allowed):
        raise BadInput(
            "it sees the tokens that it is to predict: later tokens move earlier log-probabilities"
            f" by {max(probed.moved, probed.moved_first):.2g}, so its perplexity would measure"
            " nothing"
        )
    return model, "a later token changes no earlier log-probability"


def is_row_by_row(model: ScoringModel, probed: Probed) -> Outcome:
    """Probe: compare, by the log-probabilities in `probed`, without a run of the model, rows that
    were scored alone with the same rows in one batch, where the shorter ones are padded. Return a
    pair: the model, or a copy with `is_alone` set if they differ by more than IN_A_BATCH times
    `probed.allowed` or one is NaN, so that one row at a time is scored; and a sentence on the
    outcome. No outcome is an error."""
    moved = _difference(probed.alone, probed.together)
    # Not `>`, because NaN is a difference too.
    if not moved <= IN_A_BATCH * probed.allowed:
        sentence = (
            f"a row in a batch moves by {moved:.2g} from the row alone: one row at a time is scored"
        )
        return replace(model, is_alone=True), sentence
    if model.length_switch:
        sentence = (
            f"rows of up to {model.length_switch:,} inputs, which the model reads otherwise, are in"
            " batches apart"
        )
        return model, sentence
    return model, "a row in a batch, beside padding or not, is the row alone"


PROBES: dict[str, Callable[[ScoringModel, Probed], Outcome]] = {
    "repeatable": is_repeatable,
    "causal": is_causal,
    "row by row": is_row_by_row,
}


def probe(model: ScoringModel, weights: str) -> tuple[ScoringModel, dict[str, str]]:
    """Check by a few short forward passes that a model is repeatable and causal, and that it gives
    a row in a batch the scores of the row alone. Return a pair: the ScoringModel, with `is_alone`
    True if the last check fails, so that one row at a time is scored; and a dict from the title of
    each check to a sentence on its outcome. Every rank of the model's mesh calls it. Raises
    BadInput for a model that is not repeatable or not causal.

    The outcomes are cached under `weights`, a digest of the model's weights, and everything else on
    which scores depend; rank 0's cache decides for all ranks. A model with a context or a
    vocabulary of fewer than SHORTEST (4) tokens is not checked: it is returned as it is, with an
    empty dict.
    """
    checked: dict[str, str] = {}
    if min(model.seq_length, model.vocab_size) < SHORTEST:
        return model, checked
    questions = [ask.__qualname__ for ask in PROBES.values()]
    made_of = sha256_json([weights, describe(model), model.length_switch, questions])
    name = f"probes-{made_of[:32]}"
    if known := model.mesh.world.gather_objects(recall(name, made_of))[0]:
        checked, is_alone = parse_json(known)
        return replace(model, is_alone=is_alone), checked
    probed = Probed(model)
    for title, ask in PROBES.items():
        model, checked[title] = ask(model, probed)
    remember(name, made_of, json.dumps([checked, model.is_alone]).encode())
    return model, checked


def _difference(rows: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """Return the largest absolute difference between log-probabilities of two scorings of the same
    rows, each a list of an array for each row; NaN if any log-probability is NaN. The caller gives
    at least one row, and no empty one."""
    # numpy's maximum, because Python's loses a NaN in any row but the first.
    return float(
        np.max([np.abs(row - other).max() for row, other in zip(rows, others, strict=True)])
    )
