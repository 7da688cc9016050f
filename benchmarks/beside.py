"""Cost of checkpoints written beside training: ten iterations with one and the ten after without,
in one run."""

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
from mlm_repro.engine.run.resolved import read_run_config, resolve
from mlm_repro.engine.train import train
from mlm_repro.engine.trainer import Trainer
from mlm_repro.experiments.benchmark import Benchmark, Case

EVERY = 10
SIZE = ("num_layers=6", "hidden_size=192", "num_heads=6", "seq_length=128")
"""The twin of 8.3b: 3.3 million parameters, 40 MB of checkpoint."""
GOAL = 1.02


def measure(rounds: int) -> Benchmark:
    """Train in a process of its own and compare ten iterations that write a checkpoint with ten
    that do not. A round is twenty iterations, after the first ten."""
    ends = apart("training", _ends_of_iterations, EVERY * (2 * rounds + 2))
    case = Case(name=f"a checkpoint every {EVERY} iterations")
    blocks = [
        [b - a for a, b in zip(*marks, strict=True)] for marks in pairwise(ends[EVERY - 1 :: EVERY])
    ]
    without, beside = blocks[: 2 * rounds : 2], blocks[1 : 2 * rounds + 1 : 2]
    case.ratios.append(
        ratio(
            "thread time × that of the iterations",
            [thread for thread, *_ in beside],
            [thread - saving for thread, _, saving in beside],
            GOAL,
            less_is_better=True,
        )
    )
    for number, what in enumerate(("thread", "wall")):
        with_save, without_save = (
            [block[number] for block in chosen] for chosen in (beside, without)
        )
        for name, times in (("with", with_save), ("without", without_save)):
            case.series.append(series(name, f"{what} time of {EVERY} iterations", "s", *times))
        case.ratios.append(
            ratio(f"{what} time × the ten without", with_save, without_save, less_is_better=True)
        )
    return Benchmark(
        benchmark="checkpoints",
        title="Checkpoints written beside training",
        cases=[case],
        notes=[
            "thread: processor time of the thread that trains, which other work on the machine does"
            " not lengthen; another thread writes, on a core of its own if the machine has one."
            " That of the iterations is without the copy, the probe and what ranks tell each other."
            " wall: what passes meanwhile."
        ],
        setting={"rounds": rounds},
    )


def _ends_of_iterations(iterations: int) -> list[tuple[float, float, float]]:
    """Return, as each iteration ends, this thread's processor time, the wall time, and the
    processor time that saving has taken so far.

    Every other ten iterations end in a save.
    """
    torch.set_num_threads(1)
    ends, saving = list[tuple[float, float, float]](), [0.0]

    def noted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(trainer: Trainer, *arguments: Any) -> Any:
            begun = time.thread_time()
            done = method(trainer, *arguments)
            if arguments:
                ends.append((time.thread_time(), time.monotonic(), saving[0]))
            else:
                saving[0] += time.thread_time() - begun
            return done

        return call

    for name in ("iterate", "_save", "_go_on_saving"):
        setattr(Trainer, name, noted(getattr(Trainer, name)))
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_dataset(Path(folder) / "data")
        stated = [f"model.{setting}" for setting in SIZE]
        stated += [
            f"train.iterations={iterations}",
            f"train.checkpoint_interval={2 * EVERY}",
            "train.precision=fp32",
        ]
        stated += [
            "train.global_batch_size=8",
            "train.microbatch_size=4",
            f"train.validation_interval={iterations}",
        ]
        config = read_run_config("355m", [*stated, f"data.dataset={dataset}"])
        train(resolve(config, 1), Path(folder) / "runs")
    return ends
