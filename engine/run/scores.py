"""Scores of a run's checkpoints by protocols of `mlm-eval`, which training starts as a command of
its own. Imports no torch."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.run.files import Evaluation
from mlm_repro.lineage.chain import checkpoint_path
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.files import read_object
from mlm_repro.lineage.processes import end_with_parent
from mlm_repro.lineage.progress import Progress

if TYPE_CHECKING:
    from mlm_repro.engine.parallel.mesh import Axis

SHOWN = ("accuracy", "perplexity", "bits_per_byte")
"""Numbers of a result that a run keeps, where the protocol gives them."""


def ask_evaluation(*words: str) -> None:
    """Run `mlm-eval` with these arguments in a process of its own, on one rank whatever the layout
    of the training is. Raises BadInput with its last sentence if it fails."""
    done = subprocess.run(
        [Path(sys.executable).with_name("mlm-eval"), *words, "--quiet"],
        # Not a rank of the training, whose variables it would read.
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=end_with_parent,
    )
    if done.returncode:
        sentence = done.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
        raise BadInput(sentence or f"mlm-eval ended with {done.returncode}")


def score_checkpoint(run: Path, iteration: int, protocol: str) -> Evaluation:
    """Score the run's checkpoint of an iteration by a protocol, and return a line of metrics.jsonl.
    Raises BadInput as `ask_evaluation` does."""
    place = str(checkpoint_path(run, iteration))
    file = run / f".{protocol}.json"
    ask_evaluation("run", protocol, "--ckpt", place, "--json", str(file))
    result = read_object(file)
    file.unlink()
    scores = {
        # The task is another than the protocol where one stood in for it.
        f"{result['task']} {name}": result[name]
        for name in SHOWN
        if result.get(name) is not None
    }
    return Evaluation(kind="evaluation", iteration=iteration, scores=scores)


def score(
    config: RunConfig,
    run: Path,
    world: "Axis",
    log: Callable[[Evaluation], None],
    progress: Progress,
    iteration: int,
) -> None:
    """Score a run's checkpoint of an iteration by each protocol of `record.evaluate`, and log the
    scores. Every rank of `world` calls it, and waits. A failure is a warning."""
    with ThreadPoolExecutor(1) as pool:
        for protocol in config.record.evaluate:
            work = (
                pool.submit(score_checkpoint, run, iteration, protocol) if world.rank == 0 else None
            )
            # A message every second, because a rank that waits for minutes counts as lost.
            while any(world.gather_objects(work and not wait([work], 1).done)):
                pass
            try:
                line = work and work.result()
            except BadInput as error:
                progress.note(f"warning: {protocol} gives no scores after {iteration:,}: {error}")
                continue
            if line:
                log(line)
                shown = ", ".join(f"{name} {value:.4g}" for name, value in line.scores.items())
                progress.say(f"{config.name}: scores after {iteration:,}: {shown}")
