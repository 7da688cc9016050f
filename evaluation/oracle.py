"""The oracle: a small checkpoint and texts on which every convention gives another number.

Weights are whole multiples of 2^-13 from SHAKE-256 of SEED, the first seed from 1234 on by which all conventions lie
apart. The search and the table's numbers are made by `python -m tests.evaluation.oracle_search` in the repository.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from data_pipeline.tokens.tokenizer import END_OF_TEXT
from engine.formats import new_output
from engine.formats.huggingface import WEIGHTS
from engine.formats.vocabulary import MERGES, VOCABULARY
from lineage.atomic import read_json, write_bytes, write_text
from lineage.digest import seal

FILES = Path(__file__).parent / "oracle_files"
SEED = 1236


def write_oracle(out: Path) -> None:
    """Write the directory `out`: checkpoint, texts, tasks for lm-evaluation-harness, table and instructions."""
    content = read_json(FILES / "oracle.json")
    with new_output(out) as directory:
        skipped = shutil.ignore_patterns("__pycache__", "oracle.json")
        shutil.copytree(FILES, directory, ignore=skipped, dirs_exist_ok=True)
        write_text(directory / "model" / VOCABULARY, spell_vocabulary((FILES / "model" / MERGES).read_text("utf-8")))
        for name, documents in content["texts"].items():
            lines = (json.dumps({"text": each, "page": each}) + "\n" for each in documents)
            write_text(directory / "texts" / f"{name}.jsonl", "".join(lines))
            write_text(directory / "texts" / f"{name}.txt", "\n\n".join(documents))
        write_bytes(directory / "model" / WEIGHTS, draw_weights(SEED, content["weights"]))
        seal(directory)


def spell_vocabulary(merges: str) -> str:
    """The JSON of GPT-2's bytes, the pairs of merges.txt and end-of-text, numbered."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    entries = [*letters, *range(256, 512 - len(letters))]
    pairs = [line.replace(" ", "") for line in merges.splitlines()[1:]]
    return json.dumps({entry: place for place, entry in enumerate([*map(chr, entries), *pairs, END_OF_TEXT])}) + "\n"


def draw_weights(seed: int, shapes: Mapping[str, Sequence[int]]) -> bytes:
    """The weights that follow from a seed, as a file of safetensors."""
    weights = {}
    for name, shape in shapes.items():
        drawn = hashlib.shake_256(f"{seed} {name}".encode()).digest(2 * math.prod(shape))
        values = (np.frombuffer(drawn, "<i2").reshape(shape) // 4).astype(np.float32) / 2**13  # from -1 to 1
        values /= 1 if name == "wte.weight" else 4
        weights[f"transformer.{name}"] = values + (name.endswith("weight") and len(shape) == 1)
    return save(weights, {"format": "pt"})
