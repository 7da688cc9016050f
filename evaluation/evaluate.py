"""Evaluates a checkpoint by named protocols, from a directory to results."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

import numpy as np

from mlm_repro.engine.launch.mesh import telling_of_lost_ranks
from mlm_repro.evaluation.checkpoints import EvaluatedCheckpoint, open_checkpoint
from mlm_repro.evaluation.models.places import Place
from mlm_repro.evaluation.protocol import Request, Scores, Task, Tokens
from mlm_repro.evaluation.schema import Provenance, Result
from mlm_repro.evaluation.scoring.scores import NoMemory, remembering, score, score_with_memory
from mlm_repro.evaluation.settings import Settings
from mlm_repro.lineage.environment import describe_environment
from mlm_repro.lineage.errors import DataMissing
from mlm_repro.lineage.extras import installed
from mlm_repro.lineage.files import Environment
from mlm_repro.lineage.progress import Progress, announce

COMPUTING = (
    "transformers",
    "gguf",
    "peft",
    "accelerate",
    "numba",
    "bitsandbytes",
    "compressed-tensors",
    "gptqmodel",
)
"""Packages that may compute a model and whose versions a result records."""
MakeTask = Callable[[EvaluatedCheckpoint], Task]
"""Function that builds a task for a given EvaluatedCheckpoint, from its tokenizer and context. It
raises DataMissing or NoMemory if the data or the kind of model is missing."""


@dataclass(frozen=True)
class Evaluation:
    """A finished task with its scores and its result."""

    task: Task
    scores: Scores
    result: Result


@dataclass(frozen=True)
class Evaluations:
    """Answer of an evaluation of a checkpoint, two dicts by the requested name of a task: `done`
    has for each finished task its Evaluation, and `missing` for each task that could not run a
    sentence with the reason."""

    done: dict[str, Evaluation]
    """Requested name → finished task with its scores and result."""
    missing: dict[str, str]
    """Requested name → sentence on why the task could not run."""


def evaluate(
    place: Place,
    tasks: Mapping[str, MakeTask],
    settings: Settings,
    limit: int | None = None,
    window: int | None = None,
) -> Evaluations:
    """Run tasks, given by requested name as functions that build them, on a checkpoint of any
    format or on a run's newest checkpoint, and return the Evaluations: in one pass over shared
    requests, but tasks that use a Transformer-XL's memory one by one. Every rank of the settings'
    layout calls it. `limit` is a number of windows or examples of each task, spread evenly over the
    test, or with that memory the first ones; `window` is the longest input, in tokens. The first
    rank prints tasks' notes to standard error.

    A task whose data is missing, or that needs a Transformer-XL's memory and finds a model without
    it or several ranks, is left out, and stands with the reason under `missing`. Raises DataMissing
    or NoMemory if no task is left, BadInput for a checkpoint that cannot be scored or a `window`
    that it or a task does not take, IntegrityFailure for a damaged checkpoint or an implausible
    loss, ExtraMissing if transformers is needed and missing, and HardwareMissing if the memory of
    the GPU or the machine does not suffice.
    """
    started = time.monotonic()
    ready = {}
    missing = {}
    evaluated = open_checkpoint(place, settings).within(window)
    for name, make in tasks.items():
        try:
            task = make(evaluated)
            if task.with_memory:
                remembering(evaluated.model)
            ready[name] = task.limited(limit)
        except (DataMissing, NoMemory) as error:
            missing[name] = error
    if not ready:
        raise next(iter(missing.values()))
    for task in ready.values():
        if task.note and evaluated.model.mesh.is_first:
            print(f"warning: {task.note}", file=sys.stderr)
    scored = _score_all(list(ready.values()), evaluated, settings)
    provenance = Provenance(
        kind=evaluated.kind,
        checkpoint=_shown(evaluated.directory, place),
        checkpoint_digest=evaluated.digest,
        tokenizer_digest=evaluated.tokenizer.digest,
        dtype=str(evaluated.model.dtype).removeprefix("torch."),
        seconds=time.monotonic() - started,
        environment=_environment(),
        backend=evaluated.backend,
        batch_size=1 if evaluated.model.is_alone else settings.batch_size,
        checked=evaluated.checked,
        first_tokens=[
            evaluated.tokenizer.decode([token]) for token in evaluated.tokenizer.first_tokens
        ],
    )
    done = {}
    for (name, task), scores in zip(ready.items(), scored, strict=True):
        result = task.result(scores, provenance)
        if evaluated.notes:
            result = result.model_copy(update={"warnings": [*evaluated.notes, *result.warnings]})
        done[name] = Evaluation(task, scores, result)
    return Evaluations(done, {name: str(error) for name, error in missing.items()})


def _environment() -> Environment:
    """Return the Environment of this machine: its description, with the version of each installed
    package in COMPUTING, those that may compute a model, added."""
    environment = describe_environment()
    versions = {name: installed(name) for name in COMPUTING}
    more = {name: version for name, version in versions.items() if version}
    return environment.model_copy(update={"packages": environment.packages | more})


def _score_all(
    tasks: Sequence[Task], evaluated: EvaluatedCheckpoint, settings: Settings
) -> list[Scores]:
    """Score the tasks' requests and return a list with one Scores for each task, in order; the list
    is the same on every rank. Tasks without memory, a Transformer-XL's states of earlier tokens,
    share one pass over the model, in which the tokens of the first task that bans any are banned
    for all; tasks with memory are scored one by one. Every rank calls it. Raises the errors of
    `score_shared` and `score_with_memory`, such as BadInput if there is no request or one is longer
    than the model's context, HardwareMissing if a GPU has too little room, and NoMemory for a task
    with memory if the model has none or is on several ranks."""
    plain = [task for task in tasks if not task.with_memory]
    banned = next((task.banned for task in plain if task.banned is not None), None)
    if len(tasks) == 1:
        title = tasks[0].name
        unit = tasks[0].unit
    else:
        title = f"{len(tasks)} protocols"
        unit = "requests"
    shared = iter(
        score_shared(evaluated, [task.requests for task in plain], settings, title, unit, banned)
    )
    scored = []
    for task in tasks:
        with Progress(task.name, len(task.requests), task.unit) as progress:
            scored.append(
                score_with_memory(evaluated.model, task.requests, progress.advance)
                if task.with_memory
                else next(shared)
            )
    return scored


def score_shared(
    evaluated: EvaluatedCheckpoint,
    request_lists: Sequence[Sequence[Request]],
    settings: Settings,
    title: str,
    unit: str = "requests",
    banned: Tokens | None = None,
) -> list[Scores]:
    """Score lists of requests and return a list with the Scores of each list, in order. A request
    in several lists is scored once; scores that an earlier evaluation stored are read, and new ones
    are stored. Every rank of the model's mesh calls it. Without lists the result is empty.

    Raises RankLost if another rank ends, and the errors of `score`: BadInput if no list has a
    request, or for a request longer than the model's context, an unknown token, or workers that do
    not go with the device or ranks; UserError if a worker ends early; HardwareMissing if a GPU's
    memory lacks room for one request, or for a batch on ranks that divide the model.

    Tokens that are `banned` do not count as answers in the column `greedy_allowed`. The cost is
    announced and the progress is shown under `title`, with `unit` as the plural noun for requests.
    """
    if not request_lists:
        return []
    requests, indices = share(request_lists)
    tokens = sum(len(request.tokens) for request in requests)
    announce(
        f"{len(requests):,} {unit}, {tokens:,} tokens through {evaluated.num_parameters:,}"
        " parameters",
        "less the scores that earlier evaluations kept",
    )
    with Progress(title, len(requests), unit) as progress, telling_of_lost_ranks():
        scores = score(
            evaluated.model,
            requests,
            settings.batch_size,
            settings.workers,
            progress.advance,
            banned,
            evaluated.store,
            progress.start_at,
        )
    return list(starmap(scores.taken, zip(indices, request_lists, strict=True)))


def _shown(directory: Path, place: Place) -> str:
    """Return as text the name for readers of the checkpoint that lies in `directory` and was asked
    for as `place.asked`: `RUN/CHECKPOINT` for one of this suite that lies at or below that path;
    else the last name of that path, resolved; or, where no such path exists, the text that was
    asked for, such as the hub's name."""
    asked = place.asked
    if place.format == "native" and asked.exists() and directory.is_relative_to(asked.resolve()):
        return f"{directory.parent.parent.name}/{directory.name}"
    return asked.resolve().name if asked.exists() else str(asked)


def share(tasks: Sequence[Sequence[Request]]) -> tuple[list[Request], list[Tokens]]:
    """Return a pair: a list of the distinct requests of all tasks, in the order in which they first
    occur, and a list with an int64 array for each task, the index of each of its requests in the
    first list. `tasks` has a list of requests for each task.

    Requests of equal tokens are one, with the largest number of scored tokens.
    """
    distinct: dict[bytes, tuple[int, Request]] = {}
    indices = []
    for requests in tasks:
        own = np.empty(len(requests), dtype=np.int64)
        for number, request in enumerate(requests):
            key = request.tokens.tobytes()
            index, known = distinct.get(key, (len(distinct), request))
            # A task that scores fewer of the tokens takes the last scores of the larger request.
            distinct[key] = index, max(known, request, key=lambda r: r.num_scored)
            own[number] = index
        indices.append(own)
    return [request for _, request in distinct.values()], indices
