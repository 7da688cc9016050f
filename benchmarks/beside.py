"""Cost of checkpoints written beside training: ten iterations with one, between tens without, in
one run."""

import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import apart
from benchmarks.gpu import write_dataset
from benchmarks.timing import ratio, series
from mlm_repro.engine.launch.local import keep_large_buffers
from mlm_repro.engine.run.resolved import read_run_config, resolve
from mlm_repro.engine.train import train
from mlm_repro.engine.trainer import Trainer
from mlm_repro.experiments.benchmark import Benchmark, Case

EVERY = 10
SIZE = (
    "model.num_layers=6",
    "model.hidden_size=192",
    "model.num_heads=6",
    "model.seq_length=128",
)
"""Settings of the model that is trained; layers, width and length are those of 8.3b's twin. With
its vocabulary of letters it has 2.8 million parameters."""
GOAL = 1.02
TIMES = {"thread time": None, "wall time": None, "wall time with a core": GOAL}
"""Names of the times that are compared with those of iterations without a checkpoint, each with the
greatest ratio that is wanted, or None."""


def measure(rounds: int) -> Benchmark:
    """Train a small model in a process of its own; in each of `rounds` rounds ten iterations run
    beside a checkpoint's writing, between ten before and ten after without. Return the Benchmark,
    the record: seconds of ten iterations with and without, by the training thread's processor time,
    by the wall and by the wall less waits for a core, and their ratios. A further ratio is the
    processor time of ten iterations with a checkpoint, divided by the same less the saving's part.
    Raises UserError if the training fails or takes more than ten minutes."""
    ends = apart("training", _ends_of_iterations, EVERY * (2 * rounds + 2))
    case = Case(name=f"a checkpoint every {EVERY} iterations")
    blocks = [
        [b - a for a, b in zip(*marks, strict=True)] for marks in pairwise(ends[EVERY - 1 :: EVERY])
    ]
    beside = blocks[1::2]
    # The mean of the ten before and the ten after: a machine that grows slower or faster cancels.
    without = [[(a + b) / 2 for a, b in zip(*each, strict=True)] for each in pairwise(blocks[::2])]
    case.ratios.append(
        ratio(
            "thread time × that of the iterations",
            [thread for thread, *_ in beside],
            [thread - saving for thread, *_, saving in beside],
            GOAL,
            less_is_better=True,
        )
    )
    for number, (what, goal) in enumerate(TIMES.items()):
        more, less = ([block[number] for block in each] for each in (beside, without))
        for name, each in (("with", more), ("without", less)):
            case.series.append(series(name, f"{what} of {EVERY} iterations", "s", *each))
        case.ratios.append(ratio(f"{what} × the ten without", more, less, goal, True))
    return Benchmark(
        benchmark="checkpoints",
        title="Checkpoints written beside training",
        cases=[case],
        notes=[
            "thread: processor time of the thread that trains, which other work on the machine does"
            " not lengthen; another thread writes, on a core of its own if the machine has one."
            " That of the iterations is without the copy, the probe and what ranks tell each other."
            " wall: what passes meanwhile. wall with a core: without the time in which the thread"
            " that trains could go on and no core was free; what the writer holds it up counts."
        ],
        setting={"rounds": rounds},
    )


def _waited_for_a_core() -> float:
    """Return how many seconds this thread has waited so far for a free core; 0 where the operating
    system does not say."""
    path = Path("/proc/thread-self/schedstat")
    return int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0


def _ends_of_iterations(iterations: int) -> list[tuple[float, float, float, float]]:
    """Train the small model on random letters for `iterations` iterations, and return a list with a
    tuple for each iteration: four readings, in seconds, at its end. They are the processor time of
    this thread, the time of the wall, the time of the wall without waits for a core, and the
    processor time that saving has taken so far.

    Every twentieth iteration ends in a save. Memory is kept as `mlm-train` keeps it. Call it in a
    process of its own, because it changes the trainer's class.
    """
    keep_large_buffers()
    torch.set_num_threads(1)
    ends = list[tuple[float, float, float, float]]()
    saving = [0.0]

    def noted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(trainer: Trainer, *arguments: Any) -> Any:
            begun = time.thread_time()
            done = method(trainer, *arguments)
            if arguments:
                now = time.monotonic()
                waited = _waited_for_a_core()
                ends.append((time.thread_time(), now, now - waited, saving[0]))
            else:
                saving[0] += time.thread_time() - begun
            return done

        return call

    for name in ("iterate", "_save", "_go_on_saving"):
        setattr(Trainer, name, noted(getattr(Trainer, name)))
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_dataset(Path(folder) / "data")
        stated = [
            *SIZE,
            f"train.iterations={iterations}",
            f"train.checkpoint_interval={2 * EVERY}",
            "train.precision=fp32",
            "train.global_batch_size=8",
            "train.microbatch_size=4",
            f"train.validation_interval={iterations}",
            f"data.dataset={dataset}",
        ]
        train(resolve(read_run_config("355m", stated), 1), Path(folder) / "runs")
    return ends
