"""The search for the oracle's seed, and its table: `python -m tests.evaluation.oracle_search` writes table.csv.

The seed is the first from FIRST on by which all conventions lie apart. Numbers are computed in float64 and have seven
digits, so that every machine finds the same ones.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from engine.formats.huggingface import WEIGHTS, read_huggingface
from engine.model.gpt2 import GPT2
from engine.parallel.mesh import serial_mesh
from evaluation.conventions import AXES, LAST_WORD_AXES, Convention, LastWords, ReadText, readings
from evaluation.evaluate import share, take
from evaluation.oracle import FILES, draw_weights, write_oracle
from evaluation.protocol import Request, Scores
from lineage.atomic import read_json, write_bytes

FIRST, APART = 1234, 1e-4
PASSAGES = "passages"
TOGETHER = 500
"""Requests in one forward pass."""


def search(model: Path) -> tuple[int, list[Convention]]:
    """The seed and its conventions; `model` is an oracle's, whose weights are replaced."""
    content = read_json(FILES / "oracle.json")
    for seed in count(FIRST):
        write_bytes(model / WEIGHTS, draw_weights(seed, content["weights"]))
        parts = ({PASSAGES: content["texts"][PASSAGES]}, content["texts"])  # the first is quick
        if all(min(distances(table := measure(model, part))) > APART for part in parts):
            return seed, table
    raise AssertionError


def measure(model: Path, texts: Mapping[str, Sequence[str]]) -> list[Convention]:
    """Every convention whose numbers differ from those of all before it."""
    imported = read_huggingface(model, None, None)
    config, tokenizer = imported.model, imported.tokenizer
    assert tokenizer is not None
    asked: list[tuple[str, dict[str, str], ReadText | LastWords]] = []
    for (name, documents), axes in product(texts.items(), readings()):
        if name != PASSAGES:
            whole = "\n\n".join(documents)
            asked.append((name, axes, ReadText(axes, documents, whole, tokenizer, config.seq_length)))
    for values in product(*LAST_WORD_AXES.values()):
        axes = dict(zip(LAST_WORD_AXES, values, strict=True))
        asked.append((PASSAGES, axes, LastWords(axes, texts[PASSAGES], tokenizer, config.seq_length)))
    conventions: dict[tuple[tuple[str, str], ...], Convention] = {}
    network = GPT2(config, serial_mesh()).double().eval()
    for weights in AXES["weights"]:
        dtype = getattr(torch, weights, torch.float32)
        network.load_state_dict({name: tensor.to(dtype).double() for name, tensor in imported.tensors.items()})
        mine = [each for each in asked if each[1].get("weights", AXES["weights"][0]) == weights]
        if not mine:
            continue
        requests, places = share([read.requests for *_, read in mine])
        scores = exact_scores(network, requests, tokenizer.vocab_size)
        for (text, axes, read), where in zip(mine, places, strict=True):
            for average, value in read.averages(take(scores, where, read.requests)):
                key = {**axes, "average": average}
                conventions.setdefault((*key.items(),), Convention(key, {})).values[text] = value
    every = list(conventions.values())
    return [each for each, distance in zip(every, distances(every), strict=True) if distance > 1e-9]


def exact_scores(network: GPT2, requests: Sequence[Request], vocab_size: int) -> Scores:
    """Scores in float64."""
    columns: list[tuple[np.ndarray, np.ndarray]] = []
    for start in range(0, len(requests), TOGETHER):
        some = requests[start : start + TOGETHER]
        tokens = torch.zeros(len(some), max(len(request.tokens) for request in some), dtype=torch.long)
        for row, request in enumerate(some):
            tokens[row, : len(request.tokens)] = torch.from_numpy(request.tokens)
        with torch.inference_mode():
            logits = network.logits(network.hidden_states(tokens[:, :-1])).transpose(0, 1)[..., :vocab_size]
            chosen = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0].numpy()
            best = (logits.argmax(-1) == tokens[:, 1:]).numpy()
        for row, request in enumerate(some):
            scored = slice(len(request.tokens) - 1 - request.num_scored, len(request.tokens) - 1)
            columns.append((chosen[row, scored], best[row, scored]))
    chosen, best = map(np.concatenate, zip(*columns, strict=True))
    return Scores(chosen, best, best, best, np.array([request.num_scored for request in requests], dtype=np.int64))


def distances(conventions: Sequence[Convention]) -> Iterator[float]:
    """Relative distance of each to the nearest before it, on the text where the two are farthest apart."""
    texts = list(dict.fromkeys(text for each in conventions for text in each.values))
    numbers = np.array([[each.values.get(text, np.nan) for text in texts] for each in conventions])
    shares = np.array([each.is_share for each in conventions])
    for place, mine in enumerate(numbers):
        apart = np.abs(numbers[:place] - mine) / np.maximum(np.abs(mine), 1e-12)
        comparable = (np.isnan(numbers[:place]) == np.isnan(mine)).all(1) & (shares[:place] == shares[place])
        yield float(np.nanmax(apart[comparable], axis=1, initial=0).min(initial=math.inf))


def write_table(path: Path, conventions: Sequence[Convention]) -> None:
    names = dict.fromkeys(name for each in conventions for name in (*each.axes, *each.values))
    rows = [{**each.axes, **{text: f"{value:.7g}" for text, value in each.values.items()}} for each in conventions]
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, names, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        write_oracle(Path(folder) / "oracle")
        found, conventions = search(Path(folder) / "oracle" / "model")
    print(f"seed {found}")
    write_table(FILES / "table.csv", conventions)
