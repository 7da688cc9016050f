"""Every kind of model that transformers builds in small: those that see the future are refused,
others are exact."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mlm_repro.evaluation.checkpoints import open_checkpoint
from mlm_repro.evaluation.models.places import Place
from mlm_repro.evaluation.protocol import Request
from mlm_repro.evaluation.scoring.scores import score
from mlm_repro.evaluation.settings import Settings
from mlm_repro.lineage.errors import BadInput

pytest.importorskip("transformers")
SEE_THE_FUTURE = {
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "cpmant",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "prophetnet",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roformer",
    "xlm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xlnet",
}
"""ProphetNet's decoder sees little of it: 4e-5 in a logit, the same in float64."""


def test_every_kind_is_exact_alone_and_in_batches_or_refused(tmp_path: Path) -> None:
    from tests.evaluation.zoo import models

    rng = np.random.default_rng(1)
    rows = [rng.integers(1, 280, length) for length in (41, 41, 17, 30, 9, 3)]
    requests = [Request(row, max(1, len(row) - 4)) for row in rows]
    exact, refused, wrong = [], {}, {}
    for kind, model, directory in models(tmp_path):
        try:
            evaluated = open_checkpoint(Place.find(directory), Settings(backend="transformers"))
        except BadInput as error:
            refused[kind] = str(error)
            continue
        with torch.inference_mode():
            real = evaluated.tokenizer.vocab_size
            logits = [
                model(input_ids=torch.from_numpy(row)[None, :-1], use_cache=False).logits[0]
                for row in rows
            ]
            parts = [each[:, :real].double().log_softmax(-1).numpy() for each in logits]
        expected = [
            -part[np.arange(len(row) - 1), row[1:]][-request.num_scored :].sum()
            for part, row, request in zip(parts, rows, requests, strict=True)
        ]
        for size in (1, None):
            found = score(evaluated.model, requests, size, workers=1).nll
            if not np.allclose(found, expected, rtol=1e-5, atol=1e-5):
                wrong[kind, size] = np.abs(found / expected - 1).max()
        exact.append(kind)
    assert wrong == {}
    assert len(exact) >= 65, exact
    assert {kind for kind, why in refused.items() if "sees the tokens" in why} == SEE_THE_FUTURE, (
        refused
    )
