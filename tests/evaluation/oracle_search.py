"""The oracle's files from its texts and its search: `python -m tests.evaluation.oracle_search` writes them.

The seed is the first from FIRST on by which all conventions lie apart. Numbers are computed in float64 and have seven
digits, so that every machine finds the same ones.
"""

import csv
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from itertools import count, product
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFWriter
from safetensors.numpy import save

from mlm_repro.data_pipeline.tokens.tokenizer import END_OF_TEXT
from mlm_repro.engine.formats.huggingface import read_huggingface
from mlm_repro.engine.formats.vocabulary import MERGES, VOCABULARY
from mlm_repro.engine.model.gpt2 import GPT2
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.published import WEIGHTS
from mlm_repro.evaluation.conventions.oracle import FILES
from mlm_repro.evaluation.conventions.table import AXES, LAST_WORD_AXES, Convention, LastWords, ReadText, readings
from mlm_repro.evaluation.evaluate import share
from mlm_repro.evaluation.protocol import Request, Scores

FIRST, APART = 1234, 1e-4
TEXTS = (*["all", "prose", "letters", "wikitext", "marks"], PASSAGES := "passages")
TOGETHER = 500
"""Requests in one forward pass."""
CONTEXT, WIDTH, HEADS = 32, 16, 2
AFFINE = {"attn.c_attn": (16, 48), "attn.c_proj": (16, 16), "mlp.c_fc": (16, 64), "mlp.c_proj": (64, 16)}
GGUF_NAMES = {
    "wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "h.0.ln_1": "blk.0.attn_norm",
    "h.0.ln_2": "blk.0.ffn_norm", "h.0.attn.c_attn": "blk.0.attn_qkv", "h.0.attn.c_proj": "blk.0.attn_output",
    "h.0.mlp.c_fc": "blk.0.ffn_up", "h.0.mlp.c_proj": "blk.0.ffn_down",
}  # fmt: skip


def read_texts(directory: Path = FILES) -> dict[str, list[str]]:
    """The documents of each text."""
    files = {name: (directory / "texts" / f"{name}.jsonl").read_text("utf-8").splitlines() for name in TEXTS}
    return {name: [json.loads(line)["text"] for line in lines] for name, lines in files.items()}


def make_files(directory: Path) -> int:
    """Make in an oracle's directory what follows from its texts and merges; returns the seed of the weights."""
    for name, documents in read_texts(directory).items():
        (directory / "texts" / f"{name}.txt").write_bytes("\n\n".join(documents).encode())
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    merges = (directory / "model" / MERGES).read_text("utf-8").splitlines()[1:]
    spelled = [*map(chr, [*letters, *range(256, 512 - len(letters))]), *(pair.replace(" ", "") for pair in merges)]
    entries = {entry: place for place, entry in enumerate([*spelled, END_OF_TEXT])}
    (directory / "model" / VOCABULARY).write_text(json.dumps(entries) + "\n", encoding="utf-8")
    for seed in count(FIRST):
        weights = draw_weights(seed, len(entries))
        (directory / "model" / WEIGHTS).write_bytes(save(weights, {"format": "pt"}))
        texts = read_texts(directory)
        parts = ({PASSAGES: texts[PASSAGES]}, texts)  # the first is quick
        if all(min(distances(table := measure(directory / "model", part))) > APART for part in parts):
            break
    write_gguf(directory / "model.gguf", weights, list(entries), merges)
    (directory / "table.csv").write_text(write_table(table), encoding="utf-8")
    return seed


def draw_weights(seed: int, vocab_size: int) -> dict[str, np.ndarray]:
    """The weights that follow from a seed, as transformers names them."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocab_size, WIDTH), "wpe.weight": (CONTEXT, WIDTH)}
    shapes |= {f"{name}.{part}": (WIDTH,) for name in ("h.0.ln_1", "h.0.ln_2", "ln_f") for part in ("weight", "bias")}
    for name, shape in AFFINE.items():
        shapes |= {f"h.0.{name}.weight": shape, f"h.0.{name}.bias": shape[1:]}
    weights = {}
    for name, shape in shapes.items():
        drawn = hashlib.shake_256(f"{seed} {name}".encode()).digest(2 * math.prod(shape))
        values = (np.frombuffer(drawn, "<i2").reshape(shape) // 4).astype(np.float32) / 2**13  # from -1 to 1
        values /= 1 if name == "wte.weight" else 4
        weights[f"transformer.{name}"] = values + (name.endswith("weight") and len(shape) == 1)
    return weights


def write_gguf(path: Path, weights: Mapping[str, np.ndarray], entries: list[str], merges: list[str]) -> None:
    """Write the model as llama.cpp reads it; its converter knows published vocabularies alone."""
    file = GGUFWriter(path, "gpt2")
    file.add_block_count(1)
    file.add_context_length(CONTEXT)
    file.add_embedding_length(WIDTH)
    file.add_feed_forward_length(4 * WIDTH)
    file.add_head_count(HEADS)
    file.add_layer_norm_eps(1e-5)
    file.add_file_type(0)
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list(entries)
    file.add_token_types([1] * (len(entries) - 1) + [3])
    file.add_token_merges(merges)
    file.add_bos_token_id(len(entries) - 1)
    file.add_eos_token_id(len(entries) - 1)
    for name, values in weights.items():
        place, _, part = name.removeprefix("transformer.").rpartition(".")
        file.add_tensor(f"{GGUF_NAMES[place]}.{part}", np.ascontiguousarray(values.T if ".c_" in name else values))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


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
            for average, value in read.averages(scores.taken(where, read.requests)):
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
            logits = network.logits(network(tokens[:, :-1])).transpose(0, 1)[..., :vocab_size]
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


def write_table(conventions: Sequence[Convention]) -> str:
    names = dict.fromkeys(name for each in conventions for name in (*each.axes, *each.values))
    rows = [{**each.axes, **{text: f"{value:.7g}" for text, value in each.values.items()}} for each in conventions]
    file = StringIO()
    table = csv.DictWriter(file, names, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return file.getvalue()


if __name__ == "__main__":
    print(f"seed {make_files(FILES)}")
