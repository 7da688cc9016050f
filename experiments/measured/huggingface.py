"""A Hugging Face GPT-2 divided over tensor-parallel ranks: compared with the undivided model, and
merged back."""

import tempfile
from filecmp import cmpfiles
from itertools import chain
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from mlm_repro.engine.config import ModelConfig, ParallelConfig
from mlm_repro.engine.formats.huggingface import FORMATS, named_as_theirs
from mlm_repro.engine.formats.model_shards import load_rank, merge_model, shard_model
from mlm_repro.engine.launch.forked import run_forked
from mlm_repro.engine.launch.mesh import build_mesh
from mlm_repro.engine.model.gpt2 import GPT2
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.published import CONFIG, WEIGHTS
from mlm_repro.experiments.measured.traffic import of_layer
from mlm_repro.experiments.sealed import Line, lines
from mlm_repro.lineage.atomic import write_json
from mlm_repro.lineage.progress import announce

WIDTHS = (1, 2, 4)
"""Numbers of tensor-parallel ranks over which the model is divided."""
SHAPE = ModelConfig(
    num_layers=4,
    hidden_size=128,
    num_heads=4,
    seq_length=64,
    vocab_size=1000,
    padded_vocab_size=1024,
    dropout=0.0,
)
TEXTS = 8
TOKENS = 32
NEW_TOKENS = 24
SEED = 1
SERIES = "GPT-2 of Hugging Face"
Answers = tuple[NDArray[np.float32], list[list[int]]]
"""Logits of every token, [texts, tokens, v], and the list of the token ids of every text with its
greedy continuation."""


def measure_huggingface() -> list[Line]:
    """Divide a small GPT-2 of Hugging Face over several numbers of ranks and return a list of
    lines, dicts with a record's fields: the largest difference of its logits from the ones on one
    rank, over all numbers of ranks and for each; the percentages of equal greedy continuations and
    of merged files equal to the undivided model's; and the number of a layer's collectives. Starts
    processes."""
    announce(
        f"a small model on {', '.join(map(str, WIDTHS))} processes, {TEXTS} texts of"
        f" {TOKENS + NEW_TOKENS} tokens"
    )
    with tempfile.TemporaryDirectory() as folder:
        theirs = write_huggingface(Path(folder) / "theirs")
        by_width = {}
        same_files = files = 0
        for tp in WIDTHS:
            divided = Path(folder) / f"tp-{tp}"
            shard_model(theirs, divided, tp)
            by_width[tp] = run_forked(answers, tp, divided, tp)[0]
            merged = merge_model(divided, Path(folder) / f"merged-{tp}")
            names = {path.name for path in (*theirs.iterdir(), *merged.iterdir())}
            same_files += len(cmpfiles(theirs, merged, names, shallow=False)[0])
            files += len(names)
    logits, texts = by_width[1]
    differences = {tp: float(np.abs(by_width[tp][0] - logits).max()) for tp in WIDTHS[1:]}
    same = [list(map(eq, texts, by_width[tp][1])) for tp in WIDTHS[1:]]
    values = {
        "largest_logit_difference": max(differences.values()),
        "identical_generations_percent": 100 * float(np.mean(same)),
        "identical_files_percent": 100 * same_files / files,
        "collectives_per_layer": collectives_per_layer(),
    }
    curve = [
        lines(SERIES, {"largest_logit_difference": value}, x=float(tp), x_name="tp")
        for tp, value in differences.items()
    ]
    note = f"random weights, {TEXTS} texts of {TOKENS} tokens and {NEW_TOKENS} new ones, in fp32"
    return [line | {"seed": SEED, "note": note} for line in chain(lines(SERIES, values), *curve)]


def write_huggingface(directory: Path) -> Path:
    """Write a GPT-2 of random weights, the same at every call, with its `config.json` as Hugging
    Face does, into `directory`, which must not exist, and return `directory`."""
    model = GPT2(SHAPE, serial_mesh())
    generator = torch.Generator().manual_seed(SEED)
    drawn = {
        name: torch.randn(tensor.shape, generator=generator) * 0.1
        for name, tensor in model.named_parameters()
    }
    directory.mkdir()
    save_file(named_as_theirs(drawn, SHAPE), directory / WEIGHTS, metadata={"format": "pt"})
    write_json(directory / CONFIG, FORMATS["gpt2"].their_config(SHAPE))
    return directory


def answers(divided: Path, tp: int) -> Answers:
    """Run transformers' model in the directory `divided`, which holds `tp` parts, on `tp` ranks,
    each of which calls this, on random texts that are the same at every call. Return on each rank a
    float32 array of the model's logits [texts, tokens, v], and a list with a list for each text:
    the text's token ids, followed by the token ids of its greedy continuation."""
    model: Any = load_rank(divided, build_mesh(Layout(tp=tp)).tp)
    tokens = torch.randint(
        0, SHAPE.vocab_size, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(SEED)
    )
    with torch.inference_mode():
        logits = model(tokens).logits
    continued = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return logits.numpy(), continued.tolist()


def collectives_per_layer() -> int:
    """Return the number of collectives on the activations of one of the engine's layers, in a
    forward and a backward pass together, with the largest of `WIDTHS` as tensor-parallel ranks.
    Starts processes."""
    _, traffic = run_forked(of_layer, WIDTHS[-1], ParallelConfig(tp=WIDTHS[-1]))[0]
    return traffic.calls.total()
