"""The oracle's files from its texts and its search: `python -m tests.evaluation.oracle_search`
writes them.

The seed is the first from FIRST on by which all conventions lie apart. Numbers are computed in
float64 and have seven digits, so that every machine finds the same ones.
"""

import csv
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import StringIO
from itertools import count, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from gguf import GGUFWriter
from safetensors.numpy import save

from mlm_repro.data_pipeline.tokens.tokenizer import END_OF_TEXT
from mlm_repro.engine.formats.huggingface import read_huggingface
from mlm_repro.engine.formats.vocabulary import MERGES, VOCABULARY, read_vocabulary
from mlm_repro.engine.model.gpt2 import GPT2
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.published import WEIGHTS
from mlm_repro.evaluation.conventions.oracle import FILES, SECOND
from mlm_repro.evaluation.conventions.table import (
    GPT2 as OF_GPT2,
)
from mlm_repro.evaluation.conventions.table import (
    LLAMA,
    Convention,
    LastWords,
    ReadText,
    Usage,
    last_word_readings,
)
from mlm_repro.evaluation.evaluate import share
from mlm_repro.evaluation.models.pretrained import PretrainedTokenizer
from mlm_repro.evaluation.protocol import Encoder, Request, Scores

FIRST, APART = 1236, 1e-4
LEAST = 0.004
"""A reading with a change has no rare average: the table would be twice as long."""
TEXTS = (*["all", "prose", "letters", "wikitext", "marks"], PASSAGES := "passages")
TOGETHER = 500
"""Requests in one forward pass."""
CONTEXT, WIDTH, HEADS = 32, 16, 2
AFFINE = {
    "attn.c_attn": (16, 48),
    "attn.c_proj": (16, 16),
    "mlp.c_fc": (16, 64),
    "mlp.c_proj": (64, 16),
}
REAL, ROWS, LAYERS = 344, 352, 2
"""Entries of the second checkpoint's tokenizer, rows of its output layer."""
PARTS = {
    "input_layernorm": (16,),
    "post_attention_layernorm": (16,),
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (8, 16),
    "self_attn.v_proj": (8, 16),
    "self_attn.o_proj": (16, 16),
    "mlp.gate_proj": (32, 16),
    "mlp.up_proj": (32, 16),
    "mlp.down_proj": (16, 32),
}
GGUF_NAMES = {
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "h.0.ln_1": "blk.0.attn_norm",
    "h.0.ln_2": "blk.0.ffn_norm",
    "h.0.attn.c_attn": "blk.0.attn_qkv",
    "h.0.attn.c_proj": "blk.0.attn_output",
    "h.0.mlp.c_fc": "blk.0.ffn_up",
    "h.0.mlp.c_proj": "blk.0.ffn_down",
}


class Variant(NamedTuple):
    """A model in one way: axes of it, and the logits [b, s, v] in float64 of token ids [b, s]."""

    axes: dict[str, str]
    logits: Callable[[torch.Tensor], torch.Tensor]


def read_texts(directory: Path = FILES) -> dict[str, list[str]]:
    """The documents of each text."""
    files = {
        name: (directory / "texts" / f"{name}.jsonl").read_text("utf-8").splitlines()
        for name in TEXTS
    }
    return {name: [json.loads(line)["text"] for line in lines] for name, lines in files.items()}


def make_files(directory: Path) -> tuple[int, int]:
    """Make in an oracle's directory what follows from its texts and tokenizers; returns the seeds
    of the weights."""
    for name, documents in read_texts(directory).items():
        (directory / "texts" / f"{name}.txt").write_bytes("\n\n".join(documents).encode())
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    merges = (directory / "model" / MERGES).read_text("utf-8").splitlines()[1:]
    spelled = [
        *map(chr, [*letters, *range(256, 512 - len(letters))]),
        *(pair.replace(" ", "") for pair in merges),
    ]
    entries = {entry: place for place, entry in enumerate([*spelled, END_OF_TEXT])}
    (directory / "model" / VOCABULARY).write_text(json.dumps(entries) + "\n", encoding="utf-8")
    tokenizer = read_vocabulary(directory / "model")[0]
    seed = search(
        directory,
        OF_GPT2,
        lambda seed: draw_weights(seed, gpt2_shapes(len(entries))),
        gpt2_variants,
        tokenizer,
    )
    write_gguf(
        directory / "model.gguf",
        draw_weights(seed, gpt2_shapes(len(entries))),
        list(entries),
        merges,
    )
    second = directory / SECOND
    own = PretrainedTokenizer(transformers.AutoTokenizer.from_pretrained(second / "model"), {})
    return seed, search(
        second, LLAMA, lambda seed: draw_weights(seed, llama_shapes()), llama_variants, own
    )


def search(
    directory: Path,
    usage: Usage,
    draw: Callable[[int], dict[str, np.ndarray]],
    variants: Callable[[Path], list[Variant]],
    tokenizer: Encoder,
) -> int:
    """Write weights and table of a checkpoint; returns the seed of the weights."""
    texts = read_texts()
    for seed in count(FIRST):
        (directory / "model" / WEIGHTS).write_bytes(save(draw(seed), {"format": "pt"}))
        ways = variants(directory / "model")
        parts = ({PASSAGES: texts[PASSAGES]}, texts)  # the first is quick
        if all(
            min(distances(table := measure(part, usage, tokenizer, ways))) > APART for part in parts
        ):
            break
    (directory / "table.csv").write_text(write_table(table), encoding="utf-8")
    return seed


def gpt2_shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the first checkpoint's tensors, as transformers names them."""
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (vocab_size, WIDTH),
        "wpe.weight": (CONTEXT, WIDTH),
    }
    shapes |= {
        f"{name}.{part}": (WIDTH,)
        for name in ("h.0.ln_1", "h.0.ln_2", "ln_f")
        for part in ("weight", "bias")
    }
    for name, shape in AFFINE.items():
        shapes |= {f"h.0.{name}.weight": shape, f"h.0.{name}.bias": shape[1:]}
    return {f"transformer.{name}": shape for name, shape in shapes.items()}


def llama_shapes() -> dict[str, tuple[int, ...]]:
    """Shapes of the second checkpoint's tensors, as transformers names them."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (ROWS, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in PARTS.items()}
    return shapes | {"lm_head.weight": (ROWS, WIDTH)}


def draw_weights(seed: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The weights that follow from a seed."""
    weights = {}
    for name, shape in shapes.items():
        drawn = hashlib.shake_256(f"{seed} {name.removeprefix('transformer.')}".encode()).digest(
            2 * math.prod(shape)
        )
        values = (np.frombuffer(drawn, "<i2").reshape(shape) // 4).astype(
            np.float32
        ) / 2**13  # from -1 to 1
        values /= 1 if name.endswith(("wte.weight", "embed_tokens.weight", "lm_head.weight")) else 4
        weights[name] = values + (name.endswith("weight") and len(shape) == 1)
    return weights


def write_gguf(
    path: Path, weights: Mapping[str, np.ndarray], entries: list[str], merges: list[str]
) -> None:
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
        file.add_tensor(
            f"{GGUF_NAMES[place]}.{part}",
            np.ascontiguousarray(values.T if ".c_" in name else values),
        )
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def gpt2_variants(model: Path) -> list[Variant]:
    """The first checkpoint by this engine, with its weights as stored and rounded."""
    imported = read_huggingface(model, None, None)

    def variant(weights: str) -> Variant:
        network = GPT2(imported.model, serial_mesh()).double().eval()
        dtype = getattr(torch, weights, torch.float32)
        network.load_state_dict(
            {name: tensor.to(dtype).double() for name, tensor in imported.tensors.items()}
        )
        rows = imported.model.vocab_size
        return Variant(
            {"weights": weights},
            lambda tokens: network.logits(network(tokens)).transpose(0, 1)[..., :rows],
        )

    return [variant(weights) for weights in OF_GPT2.axes["weights"]]


def llama_variants(model: Path) -> list[Variant]:
    """The second checkpoint by transformers: its weights, the window of its attention, the rows of
    its softmax."""

    def variant(weights: str, attention: str, softmax: str) -> Variant:
        own = {} if attention == LLAMA.axes["attention"][0] else {"sliding_window": None}
        network = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, **own
        ).eval()
        for parameter in network.parameters():  # not the buffer of the rotary positions
            parameter.data = parameter.data.to(getattr(torch, weights, torch.float32)).float()
        network = network.double()
        rows = None if softmax == LLAMA.axes["softmax"][0] else REAL
        axes = {"weights": weights, "attention": attention, "softmax": softmax}
        return Variant(
            axes, lambda tokens: network(input_ids=tokens, use_cache=False).logits[..., :rows]
        )

    axes = [LLAMA.axes[axis] for axis in ("weights", "attention", "softmax")]
    return [
        variant(*values)
        for values in product(*axes)
        if sum(v != a[0] for v, a in zip(values, axes, strict=True)) < 3
    ]


def measure(
    texts: Mapping[str, Sequence[str]],
    usage: Usage,
    tokenizer: Encoder,
    variants: Sequence[Variant],
) -> list[Convention]:
    """Every convention whose numbers differ from those of all before it."""
    asked: list[tuple[str, dict[str, str], ReadText | LastWords]] = []
    for (name, documents), axes in product(texts.items(), usage.readings(usage.axes)):
        if name != PASSAGES:
            asked.append(
                (name, axes, ReadText(axes, documents, "\n\n".join(documents), tokenizer, CONTEXT))
            )
    for axes in last_word_readings(usage):
        asked.append((PASSAGES, axes, LastWords(axes, texts[PASSAGES], tokenizer, CONTEXT)))
    conventions: dict[tuple[tuple[str, str], ...], Convention] = {}
    usual = variants[0].axes
    for variant in variants:
        mine = [
            each
            for each in asked
            if {axis: each[1].get(axis, usual[axis]) for axis in usual} == variant.axes
        ]
        if not mine:
            continue
        requests, places = share([read.requests for *_, read in mine])
        scores = exact_scores(variant, requests)
        for (text, axes, read), where in zip(mine, places, strict=True):
            for average, value in read.averages(scores.taken(where, read.requests)):
                key = {**axes, "average": average}
                if usage.weight(key) < LEAST:
                    continue
                conventions.setdefault((*key.items(),), Convention(key, {})).values[text] = value
    every = list(conventions.values())
    return [each for each, distance in zip(every, distances(every), strict=True) if distance > 1e-9]


def exact_scores(variant: Variant, requests: Sequence[Request]) -> Scores:
    """Scores in float64."""
    columns: list[tuple[np.ndarray, np.ndarray]] = []
    for start in range(0, len(requests), TOGETHER):
        some = requests[start : start + TOGETHER]
        tokens = torch.zeros(
            len(some), max(len(request.tokens) for request in some), dtype=torch.long
        )
        for row, request in enumerate(some):
            tokens[row, : len(request.tokens)] = torch.from_numpy(request.tokens)
        with torch.inference_mode():
            logits = variant.logits(tokens[:, :-1])
            chosen = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0].numpy()
            best = (logits.argmax(-1) == tokens[:, 1:]).numpy()
        for row, request in enumerate(some):
            scored = slice(len(request.tokens) - 1 - request.num_scored, len(request.tokens) - 1)
            columns.append((chosen[row, scored], best[row, scored]))
    chosen, best = map(np.concatenate, zip(*columns, strict=True))
    return Scores(
        chosen, best, best, np.array([request.num_scored for request in requests], dtype=np.int64)
    )


def distances(conventions: Sequence[Convention]) -> Iterator[float]:
    """Distance of each from the nearest before it, on the text where the two are farthest apart.

    It is relative, and that of perplexities is in ln: the difference of losses.
    """
    texts = list(dict.fromkeys(text for each in conventions for text in each.values))
    numbers = np.array([[each.values.get(text, np.nan) for text in texts] for each in conventions])
    shares = np.array([each.is_share for each in conventions])
    for place, mine in enumerate(numbers):
        apart = np.abs(numbers[:place] - mine) / (
            np.maximum(np.abs(mine), 1e-12) if shares[place] else 1
        )
        comparable = (np.isnan(numbers[:place]) == np.isnan(mine)).all(1) & (
            shares[:place] == shares[place]
        )
        yield float(np.nanmax(apart[comparable], axis=1, initial=0).min(initial=math.inf))


def write_table(conventions: Sequence[Convention]) -> str:
    names = dict.fromkeys(name for each in conventions for name in (*each.axes, *each.values))
    rows = [
        {**each.axes, **{text: f"{value:.7g}" for text, value in each.values.items()}}
        for each in conventions
    ]
    file = StringIO()
    table = csv.DictWriter(file, names, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return file.getvalue()


if __name__ == "__main__":
    print(f"seeds {make_files(FILES)}")
