"""Log-probabilities of scored tokens, for any batch size and number of workers or ranks.

The number of workers and of data-parallel ranks changes no bit; batch size and tensor parallelism
change only the last bits. Rows are padded on the right, out of sight of a causal model's scored
positions. Padded columns of the vocabulary take no part in the softmax. Its exponentials are
float32; their sum, its logarithm and all later sums are float64. Only scored positions go through
the last layer and the output layer.

Shapes: b requests, s inputs, q positions of a request, n scored rows, h hidden, v padded
vocabulary, t tensor-parallel ranks.
"""

import hashlib
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlm_repro.engine.compiled import Array, Compiled, array, exponential, largest, load
from mlm_repro.engine.families.transformer_xl.model import TransformerXL
from mlm_repro.engine.kernels.identity import numerics_identity
from mlm_repro.engine.kernels.registry import DTYPES
from mlm_repro.engine.model.microbatch import PipelineInput, Recurrence
from mlm_repro.engine.model.stage_model import CausalModel
from mlm_repro.engine.parallel.layers import ColumnParallelLinear, RowParallelLinear
from mlm_repro.engine.parallel.mesh import MAX, MIN, Axis, ParallelMesh, serial_mesh
from mlm_repro.evaluation.models.pretrained import PretrainedModel, packed
from mlm_repro.evaluation.protocol import Request, Scores, Tokens
from mlm_repro.evaluation.scoring.store import Store
from mlm_repro.lineage.environment import available_cores
from mlm_repro.lineage.errors import BadInput, HardwareMissing, UserError
from mlm_repro.lineage.loops import config
from mlm_repro.lineage.processes import end_with_parent, hear_stops, held_back
from mlm_repro.lineage.remembered import digest_of
from mlm_repro.lineage.shipped import HOME

# Vectors of hidden size alive at once in a layer, rounded up.
ACTIVATIONS_PER_TOKEN = 16
# On a CPU, activations that its caches hold are the fastest.
MAX_ACTIVATION_BYTES = {"cpu": 16 * 2**20, "cuda": 4 * 2**30}
# On a CPU 48 MiB scored full windows 10 % faster than 24 MiB.
MAX_LOGIT_BYTES = {"cpu": 48 * 2**20, "cuda": 2**30}
TOGETHER = 1024
"""Number of exponentials that are added in float32 before they join a float64 sum."""
Batches = list[list[int]]
"""Indices of requests, a list for each batch."""


@dataclass(frozen=True)
class ScoringModel:
    """A causal language model as scoring takes it: this rank's network, the mesh of ranks,
    vocabulary, longest input, hidden size and number format. `length_switch` and `is_alone` say
    which rows must not be in one batch, because the model would read them in another way."""

    network: CausalModel | PretrainedModel
    """This rank's part of the model: a stage of an engine's model, or a whole one that transformers
    computes."""
    vocab_size: int
    """Number of real entries of the vocabulary; logits beyond them are padding."""
    seq_length: int
    """Longest input that the model takes, in tokens."""
    hidden_size: int
    dtype: torch.dtype
    mesh: ParallelMesh = field(default_factory=serial_mesh)
    length_switch: int = 0
    """Length in inputs: rows up to this length and longer rows are never in one batch, because the
    model reads them in different ways; 0 if length changes nothing."""
    is_alone: bool = False
    """True if the model reads a row in a batch otherwise than the same row alone: one row at a time
    is then scored."""

    def default_batch_size(self, width: int) -> int:
        """Return the largest number of rows of `width` inputs, at least 1, whose activations take
        at most MAX_ACTIVATION_BYTES for the kind of the model's device, cpu or cuda. Activations
        are estimated as ACTIVATIONS_PER_TOKEN vectors of hidden size for each input."""
        bytes_per_row = width * self.hidden_size * ACTIVATIONS_PER_TOKEN * self.dtype.itemsize
        return max(1, MAX_ACTIVATION_BYTES[self.mesh.device.type] // bytes_per_row)

    def rows_per_head(self) -> int:
        """Return the largest number of scored rows, at least 1, whose float32 logits over the whole
        vocabulary take at most MAX_LOGIT_BYTES for the kind of the model's device, cpu or cuda. So
        many go through the output layer at once."""
        return max(1, MAX_LOGIT_BYTES[self.mesh.device.type] // (4 * self.vocab_size))


def score(
    model: ScoringModel,
    requests: Sequence[Request],
    batch_size: int | None = None,
    workers: int | None = None,
    on_progress: Callable[[int], None] = lambda count: None,
    banned: Tokens | None = None,
    store: Store | None = None,
    on_resumed: Callable[[int], None] = lambda count: None,
) -> Scores:
    """Score all requests and return one Scores for them, in their order. A forward pass takes at
    most `batch_size` requests, by default as many as `default_batch_size` says, and one if the
    model `is_alone`. Token ids that are `banned` are ignored where the column `greedy_allowed`
    looks for the likeliest token.

    `store`, if given, is a function that is called with a dict of all that decides the scores' bits
    besides the checkpoint and its tokenizer; it returns a context manager of the StoredScores from
    which scores are read and to which new ones are added. `on_progress` gets the number of requests
    of each batch that this rank has scored, `on_resumed`, called once, the number of requests whose
    scores were stored.

    On a mesh of several ranks every rank calls it and gets all scores; batches are dealt to the
    data-parallel ranks. Otherwise, on a CPU, batches are dealt to `workers` processes of one thread
    each (by default all available cores). Raises BadInput if there is no request, for a request
    longer than the model's context, an unknown token, or several workers on a GPU or beside several
    ranks, and UserError if a worker ends early. On a GPU it raises HardwareMissing if a row does
    not fit into memory or, where ranks divide the model, if a batch does not.
    """
    mesh = model.mesh
    if not requests:
        raise BadInput("there is nothing to score: the text has no sub-word to predict")
    widest = max(len(request.tokens) for request in requests) - 1
    if widest > model.seq_length:
        raise BadInput(
            f"{widest} tokens of one window or passage are more than the {model.seq_length} that"
            " the model takes at once: give a shorter --window"
        )
    if not all(
        request.tokens.min() >= 0 and request.tokens.max() < model.vocab_size
        for request in requests
    ):
        raise BadInput(
            "the text was encoded by another model's tokenizer: it has ids beyond this model's"
            f" vocabulary of {model.vocab_size}; encode it by this model's own"
        )
    size = 1 if model.is_alone else batch_size
    batches = plan_batches(
        requests, lambda width: size or model.default_batch_size(width), model.length_switch
    )
    counts = np.array([request.num_scored for request in requests], dtype=np.int64)

    def score_one(batch: int) -> Scores | None:
        return score_in_memory(model, [requests[index] for index in batches[batch]], banned)

    settings = {
        "banned": None if banned is None else banned.tolist(),
        "requests": digest_batches(requests, batches),
    }
    with store(describe(model) | settings) if store else nullcontext() as entry:
        by_batch = (
            entry.read([counts[batch] for batch in batches]) if entry and mesh.is_first else {}
        )
        # Copied, because ranks that are threads share the gathered object.
        by_batch = dict(mesh.world.gather_objects(by_batch)[0])
        on_resumed(sum(len(batches[batch]) for batch in by_batch))
        own_batches = [batch for batch in range(len(batches)) if batch not in by_batch][
            mesh.dp.rank :: mesh.dp.size
        ]
        for batch, scores in in_workers(score_one, own_batches, _workers(model, workers)):
            if scores and mesh.tp.rank == 0:
                by_batch[batch] = scores
                if entry:
                    entry.add(batch, scores)
            on_progress(len(batches[batch]))
        for others in mesh.world.gather_objects(dict(by_batch)):
            by_batch |= others
    in_batches = Scores._make(
        map(np.concatenate, zip(*(by_batch[n] for n in range(len(batches))), strict=True))
    )
    return in_batches.taken(np.argsort(np.concatenate(batches)), requests)


def _workers(model: ScoringModel, workers: int | None) -> int:
    """Return the number of worker processes that score `model`. On a CPU and one rank it is
    `workers`, or by default the number of available cores; otherwise it is 1. Raises BadInput if
    several are requested on a GPU or on several ranks."""
    if model.mesh.device.type == "cpu" and model.mesh.layout.world_size == 1:
        return workers or available_cores()
    if workers not in (None, 1):
        raise BadInput(
            f"{workers} workers were requested, but a model on a GPU or on several ranks is scored"
            " by one: leave workers out of --set"
        )
    return 1


def describe(model: ScoringModel) -> dict[str, Any]:
    """Return a dict name → plain value of all that the bits of the model's scores depend on, such
    as this suite's code, the number format, the number of tensor-parallel ranks, the versions of
    packages, the processor and, if the model is on one, the GPU. The weights, the requests, their
    batches and the banned tokens are left out, and must be added where scores are kept by this
    dict."""
    on_cpu = model.mesh.device.type == "cpu"
    return {
        "code": _code_digest(),
        "vocab_size": model.vocab_size,
        "dtype": str(model.dtype),
        "rows_per_head": model.rows_per_head(),
        "tp": model.mesh.tp.size,
        "numerics": numerics_identity(False),
        "kernel": getattr(model.network, "kernel", ""),
        "packages": installed_packages(),
        "gpu": "" if on_cpu else torch.cuda.get_device_name(model.mesh.device),
        # Loops are compiled for this processor, which may change their last bits.
        "loops": [config.CPU_NAME, config.CPU_FEATURES],
    }


@cache
def installed_packages() -> list[str]:
    """Return a sorted list of `name-version` of every package installed in the folder of torch or
    of transformers: any may compute a model. The list is kept for further calls, so it must not be
    changed.

    The import path itself is no guide: setuptools, once it is imported, adds a folder of packages
    of its own.
    """
    origins = [spec.origin for spec in map(find_spec, ("torch", "transformers")) if spec]
    folders = {Path(origin).parents[1] for origin in origins if origin}
    packages = chain.from_iterable(folder.glob("*.dist-info") for folder in folders)
    return sorted(path.stem for path in packages)


@cache
def _code_digest() -> str:
    """Return the hexadecimal SHA-256 of this Python's version and of all files but `__pycache__` in
    the folders `engine` and `evaluation` of this package, which decide scores."""
    return digest_of(HOME / "engine", HOME / "evaluation")


def in_workers(
    work: Callable[[int], Scores | None], items: Sequence[int], workers: int
) -> Iterator[tuple[int, Scores | None]]:
    """Yield `(item, work(item))` for every number in `items` as soon as it is done, in any order.

    Worker processes, at most `workers`, are forked from this one, have one thread each and take an
    item at a time. A single worker or a single item stays in this process, with one thread too, so
    that values do not depend on the number of workers. Raises UserError if one of several workers
    ends early, and the errors of `work`.
    """
    if min(workers, len(items)) > 1:
        pool = ProcessPoolExecutor(
            min(workers, len(items)), multiprocessing.get_context("fork"), _begin, (work,)
        )
        try:
            with held_back():
                working = {pool.submit(_do, item): item for item in items}
            for done in as_completed(working):
                yield working[done], done.result()
        except BrokenProcessPool as error:
            advice = (
                "if memory ran out, --set fewer workers, which keeps what was scored, or a smaller"
                " batch_size, which begins anew"
            )
            raise UserError(f"a scoring worker ended before its work was done; {advice}") from error
        finally:
            # Killed, so that no worker finishes an item that nobody waits for.
            for process in (pool._processes or {}).values():
                process.kill()
            pool.shutdown()
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for item in items:
            yield item, work(item)
    finally:
        torch.set_num_threads(before)


def _begin(work: Callable[[int], Any]) -> None:
    """Prepare a worker process for `work`, which `_do` then calls: the process has one thread,
    ignores Ctrl-C, ends with its parent, and unblocks the stop signals, which `held_back` blocked
    while it was started."""
    # A terminal sends Ctrl-C to every process of its group; the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    hear_stops()
    torch.set_num_threads(1)
    _do.work = work  # type: ignore[attr-defined]


def _do(item: int) -> Any:
    return _do.work(item)  # type: ignore[attr-defined]


def score_in_memory(
    model: ScoringModel, requests: Sequence[Request], banned: Tokens | None
) -> Scores | None:
    """Score a batch of requests and return its Scores; if it does not fit into a GPU's memory, warn
    on standard error and score it in two halves. Token ids that are `banned` are ignored where the
    column `greedy_allowed` looks for the likeliest token. All ranks with a part of the model call
    it. Return None on a rank without the model's last stage.

    Raises HardwareMissing if a single row does not fit, or if ranks divide the model and the batch
    does not fit. On a CPU torch's error passes through.
    """
    try:
        return score_batch(model, requests, banned)
    except torch.OutOfMemoryError as error:
        if len(requests) == 1 or model.mesh.tp.size * model.mesh.pp.size > 1:
            inputs = max(len(request.tokens) for request in requests) - 1
            rows = f"{len(requests)} rows of {inputs:,} tokens"
            raise HardwareMissing(
                f"{rows} do not fit into the memory of {model.mesh.device}: --set dtype=bf16 or,"
                " for several rows, batch_size=1, or give a shorter --window"
            ) from error
    torch.cuda.empty_cache()
    half = len(requests) // 2
    print(
        f"warning: {len(requests)} rows at once do not fit into memory: {half} are tried",
        file=sys.stderr,
    )
    parts = [
        score_in_memory(model, half_of_requests, banned)
        for half_of_requests in (requests[:half], requests[half:])
    ]
    return Scores._make(map(np.concatenate, zip(*(part for part in parts if part), strict=True)))


@torch.inference_mode()
def score_batch(
    model: ScoringModel, requests: Sequence[Request], banned: Tokens | None = None
) -> Scores | None:
    """Score requests in one forward pass, in which all ranks with a part of the model take part.
    Return a single Scores of them all: its columns have the first request's scored tokens, then the
    next one's, and so on. Return None on a rank without the model's last stage. Token ids that are
    `banned` are ignored in the column `greedy_allowed`. Raises torch.OutOfMemoryError if the
    requests do not fit into a GPU's memory."""
    device = model.mesh.device
    counts = np.array([request.num_scored for request in requests], dtype=np.int64)
    lengths = np.array([len(request.tokens) - 1 for request in requests], dtype=np.int64)
    inputs = np.zeros((len(requests), lengths.max()), dtype=np.int64)
    for row, request in enumerate(requests):
        inputs[row, : lengths[row]] = request.tokens[:-1]
    q = counts.max()
    positions = np.maximum(
        lengths[:, None] - q + np.arange(q), 0
    )  # [b, q], those at the end are scored
    tokens, indices = (torch.from_numpy(array).to(device) for array in (inputs, positions))
    network = model.network
    last = partial(model.network.hidden_states_at, positions=indices)
    if (hidden := forward(network, model.mesh, tokens, network, last)) is None:  # [q, b, h]
        return None
    is_scored = torch.from_numpy(np.arange(q) >= q - counts[:, None]).to(device)  # [b, q]
    rows = hidden.transpose(0, 1)[is_scored]  # [n, h]
    targets = np.concatenate([request.tokens[-request.num_scored :] for request in requests])
    size = model.rows_per_head()
    pairs = zip(rows.split(size), torch.from_numpy(targets).to(device).split(size), strict=True)
    parts = [score_rows(model, states, labels, banned) for states, labels in pairs]
    return Scores._make(
        [*(torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True)), counts]
    )


def score_rows(
    model: ScoringModel, hidden: Tensor, targets: Tensor, banned: Tokens | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a triple of tensors [n], from states [n, h] and the target id of each: the
    log-probability of the target in nats, float64, and two flags. Every tensor-parallel rank of the
    last stage calls it with the same states and targets, and gets the same.

    The flags say whether the target is the most likely token, and whether it is the most likely one
    that is not in `banned`, an array of token ids; if `banned` is None, both flags are equal. Of
    equally likely tokens only the first counts.
    """
    axis = model.mesh.tp
    logits = model.network.logits(hidden)  # [n, v/t]
    start = axis.rank * logits.size(1)
    real = max(model.vocab_size - start, 0)
    top, part = sum_exponentials(logits, slice(0, min(logits.size(1), real)))
    highest = axis.all_reduce(top.clone(), MAX)
    total = axis.all_reduce(part * (top - highest).double().exp_())
    # A rank may hold nothing but padding.
    logits = logits[:, :real] if real else torch.full_like(logits[:, :1], float("-inf"))
    local_targets = targets - start
    elsewhere = (local_targets < 0) | (local_targets >= logits.size(1))
    target = logits.gather(1, local_targets.masked_fill(elsewhere, 0)[:, None]).squeeze(1).float()
    target = axis.all_reduce(target.masked_fill_(elsewhere, 0.0))
    greedy = allowed = _is_first_best(logits, start, targets, target, highest, axis)
    if banned is not None:
        columns = torch.from_numpy(banned).to(targets)
        columns = columns[(columns >= start) & (columns < start + logits.size(1))] - start
        logits[:, columns] = float("-inf")
        highest_allowed = axis.all_reduce(logits.amax(dim=1).float(), MAX)
        allowed = _is_first_best(logits, start, targets, target, highest_allowed, axis)
    return target.double() - highest.double() - total.log(), greedy, allowed


def _is_first_best(
    logits: Tensor, start: int, targets: Tensor, target: Tensor, highest: Tensor, axis: Axis
) -> Tensor:
    """Return a boolean tensor [n], True for each target that has the highest logit on all ranks of
    `axis`; of several such tokens only the first counts. Every rank of the axis calls it.

    `logits` [n, columns] are this rank's, one column at least and none of padding; the first is
    that of the token `start`. `target`, the logit of each target, and `highest`, the highest one of
    each row, both [n], are of all ranks, and `targets` [n] are ids of the whole vocabulary.
    """
    is_best = target == highest
    rows = is_best.nonzero().squeeze(1)
    local, best = logits[rows].float().max(dim=1)
    first = torch.where(local == highest[rows], best + start, torch.iinfo(torch.int64).max)
    is_best[rows] = axis.all_reduce(first, MIN) == targets[rows]
    return is_best


def plan_batches(
    requests: Sequence[Request], rows: Callable[[int], int], switch: int = 0
) -> Batches:
    """Return a list of batches, each a list of indices of `requests`; every request is in one
    batch. They are taken in order of length, the longest first, and at equal length the one with
    the most scored tokens first.

    `rows` is a function from a width to the largest number, at least 1, of requests in a batch; the
    width is the number of inputs, one less than the tokens, of the batch's longest request.
    Requests of at most `switch` inputs are not in a batch with requests of more than `switch`.
    """
    order = sorted(
        range(len(requests)), key=lambda i: (-len(requests[i].tokens), -requests[i].num_scored)
    )
    batches = []
    while order:
        width = len(requests[order[0]].tokens) - 1
        batch = order[: rows(width)]
        if width > switch:
            batch = [i for i in batch if len(requests[i].tokens) - 1 > switch]
        batches.append(batch)
        order = order[len(batch) :]
    return batches


def digest_batches(requests: Sequence[Request], batches: Batches) -> str:
    """Return the hexadecimal SHA-256 of all requests' tokens, of their numbers of scored tokens and
    of how `batches`, lists of indices of requests, divide the requests."""
    digest = hashlib.sha256()
    for batch in batches:
        shape = [
            len(batch),
            *(len(requests[i].tokens) for i in batch),
            *(requests[i].num_scored for i in batch),
        ]
        digest.update(np.array(shape, dtype="<i8").tobytes())
        for i in batch:
            digest.update(requests[i].tokens.astype("<i8", copy=False).tobytes())
    return digest.hexdigest()


def pack_weights(network: CausalModel) -> None:
    """Put the weights of the linear layers inside the layers of an engine's model into oneDNN's
    order, in place, if they lie in float32 or bfloat16 on a CPU with AVX-512 and oneDNN. Their
    gradients are switched off in any case: the network cannot be trained any more.

    Products of several rows get faster, products of a single row slower.
    """
    for module in network.layers.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.weight = packed(module.weight)


def forward(
    network: CausalModel | PretrainedModel,
    mesh: ParallelMesh,
    tokens: Tensor,
    run: Callable[[Tensor], Tensor],
    run_last: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """Run this rank's stage of the model: the first stage on the token ids, a later one on the
    states [s, b, h] of the stage before, for which it waits. `run` and `run_last` are functions
    of these inputs. The last stage returns the result of `run_last`; any other sends the states
    that `run` returns to the next stage, and returns None. Without a pipeline the one stage is the
    last.

    Every rank of the pipeline calls it with the same token ids [b, s].
    """
    stage = mesh.pp.rank
    stages = mesh.pp.size
    inputs = tokens
    if stage > 0:
        parameter = next(network.parameters())
        inputs = parameter.new_empty(tokens.size(1), tokens.size(0), network.config.hidden_size)
        mesh.pp.start_receive(inputs, stage - 1).wait()
    if stage == stages - 1:
        return run_last(inputs)
    mesh.pp.start_send(run(inputs).contiguous(), stage + 1).wait()
    return None


def sum_exponentials(logits: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return a pair, both [n]: the maximum of the `columns`, a slice, of each row of logits [n, v],
    float32, and the sum of exp(logit − maximum) over them, float64. Without columns they are −∞ and
    0."""
    n = len(logits)
    count = columns.stop - columns.start
    highest = logits.new_full((n,), float("-inf"), dtype=torch.float32)
    total = logits.new_zeros(n, dtype=torch.float64)
    if count <= 0:
        return highest, total
    if logits.device.type != "cpu":
        some = logits[:, columns].float()
        highest = some.amax(dim=1)
        return highest, (some - highest[:, None]).exp_().sum(dim=1, dtype=torch.float64)
    logits = logits.contiguous() if logits.dtype in DTYPES["cpu"] else logits.float().contiguous()
    _sum_exponentials(array(logits), columns.start, count, array(highest), array(total))
    return highest, total


@Compiled
def _sum_exponentials(logits: Array, start: int, count: int, highest: Array, total: Array) -> None:
    for r in range(logits.shape[0]):
        row = logits[r, start : start + count]
        most = largest(row, count)
        whole = np.float64(0.0)
        for first in range(0, count, TOGETHER):
            some = row[first : first + TOGETHER]
            part = np.float32(0.0)
            for i in range(some.size):
                part += exponential(load(some, i) - most)
            whole += part
        highest[r] = most
        total[r] = whole


class NoMemory(BadInput):
    """Raised for a model that cannot score with a Transformer-XL's memory: the model has no such
    memory, or is on several ranks."""


def remembering(model: ScoringModel) -> TransformerXL:
    """Return the model's network, a Transformer-XL with memory of earlier segments. Raises NoMemory
    for a model without such memory or on several ranks."""
    network = model.network
    if not isinstance(network, TransformerXL) or not network.config.transformer_xl.memory_length:
        raise NoMemory(
            "this protocol is for a model with memory: a Transformer-XL with memory_length above 0"
        )
    if model.mesh.layout.world_size > 1:
        raise NoMemory(
            "this protocol scores with memory, on one rank alone: leave out --set layout, and start"
            " it without torchrun"
        )
    return network


@torch.inference_mode()
def score_with_memory(
    model: ScoringModel,
    segments: Sequence[Request],
    on_progress: Callable[[int], None] = lambda count: None,
) -> Scores:
    """Score the segments of a text in order, each with the Transformer-XL's memory of earlier
    segments, and return one Scores for all, in which no token is banned. Each request must score
    all its tokens but the first, which is the last one of the request before. `on_progress` gets 1
    after each segment.

    Raises NoMemory for a model without such memory or on several ranks, and BadInput for a segment
    longer than the model's context.
    """
    network = remembering(model)
    if max(len(request.tokens) for request in segments) - 1 > model.seq_length:
        raise BadInput(
            f"the window is longer than the {model.seq_length} tokens that the model takes at once:"
            " leave out --window or give a shorter one"
        )
    device = model.mesh.device
    states = dict[int, Tensor]()
    parts = []
    for request in segments:
        tokens = torch.from_numpy(request.tokens).to(device)[None]
        batch = PipelineInput(tokens[:, :-1], tokens[:, 1:], recurrence=Recurrence(states, states))
        hidden = network.run_stage(batch.tokens, batch)[:, 0]  # [s, h]
        parts.append(score_rows(model, hidden, tokens[0, 1:], None))
        on_progress(1)
    counts = np.array([segment.num_scored for segment in segments], np.int64)
    return Scores._make(
        [*(torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True)), counts]
    )
