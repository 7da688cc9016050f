"""The frame of every benchmark: clocks, ratios within a round, losses compared, and the record on
disk."""

import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from typing import Any, Literal, TypeVar

from benchmarks.contenders import Timed, TrainingSize
from benchmarks.tables import show_benchmark
from mlm_repro.experiments.benchmark import Benchmark, Ratio, Series, write_benchmark
from mlm_repro.lineage.environment import describe_environment
from mlm_repro.lineage.errors import BadInput, Diverged, UserError
from mlm_repro.lineage.files import Environment
from mlm_repro.lineage.lock import check_place

GPU_FACTS = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)
"""Names of the fields that `nvidia-smi` is asked for."""
T = TypeVar("T")

Measured = Mapping[str, Sequence[Timed]]
"""The rounds of each contender, a Timed for each round, by the contender's name."""


def carry_out(measure: Callable[[], Benchmark], json: Path | None) -> None:
    """Call `measure`, print the Benchmark that it returns, with the machine and its load, to
    standard output, and write it to the file `json` if given.

    Raises BadInput if the file cannot be written or is another kind of file, before the call where
    that can be told; Diverged, after all this, if the Benchmark has disagreements, such as losses
    that differ.
    """
    check_place("--json", json, '"benchmark"')
    before = os.getloadavg()[0]
    result = measure()
    load = [before, os.getloadavg()[0]]
    result = result.model_copy(update={"load_average": load, "environment": described_here()})
    show_benchmark(result)
    if json is not None:
        try:
            write_benchmark(json, result)
        except OSError as error:
            raise BadInput(
                f"{json}, the file of --json, cannot be written ({error.strerror}): mend that or"
                " name another file, and measure again"
            ) from error
        print(f"written: {json}")
    if result.disagreements:
        raise Diverged("; ".join(result.disagreements))


def described_here() -> Environment:
    """Return an Environment: the machine, the software and the command of this process.

    The command is as anybody may give it: without `--json`, and of every path only the file's name.
    """
    here = describe_environment()
    versions = {name: version(name) for name in ("transformers", "triton") if find_spec(name)}
    words = [
        re.sub(r"^(--[a-z-]+=)?.*/", r"\1", word, flags=re.DOTALL)
        for before, word in pairwise(["", *here.argv])
        if before != "--json" and not word.startswith("--json")
    ]
    return here.model_copy(
        update={"packages": here.packages | versions, "argv": ["python", "-m", *words]}
    )


def cpu_seconds(function: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    """Call a function with the arguments; return a pair: the processor seconds that the call takes
    in all threads of this process, and the function's result. Child processes are not counted."""
    start = time.process_time()
    answer = function(*arguments)
    return time.process_time() - start, answer


def child_seconds(*command: object) -> float:
    """Run a program, given with its arguments, under variables that keep Hugging Face's libraries
    offline and OpenMP and tokenizers to one thread. Return the processor seconds of it and its
    children; its output is dropped. Raises UserError with the last line of its standard error if it
    fails."""
    offline = {
        # One thread, and no request to the hub: the time is the program's own work.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "",
    }
    before = getrusage(RUSAGE_CHILDREN)
    done = subprocess.run(
        [*map(str, command)], env=os.environ | offline, capture_output=True, text=True, check=False
    )
    after = getrusage(RUSAGE_CHILDREN)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise UserError(f"{Path(str(command[0])).name} failed: {last}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def rates(size: TrainingSize, measured: Measured) -> dict[str, list[float]]:
    """Return a dict by contender of a list of its tokens a second in each round, by the median
    iteration of that round. `size` gives the tokens of an iteration; the second is that of the
    clock that timed the rounds, such as a processor second."""
    return {
        name: [size.tokens / median(timed.seconds) for timed in many]
        for name, many in measured.items()
    }


def ratio(
    name: str,
    numerators: Sequence[float],
    denominators: Sequence[float],
    goal: float | None = None,
    less_is_better: bool = False,
) -> Ratio:
    """Return the Ratio called `name` of a benchmark's record: in `rounds` the ratios of numerators
    to denominators, which have one number a round, in which a slow round cancels, and as its value
    the median of these; all are rounded to six significant digits. `goal` is the least value
    wanted, or the greatest with `less_is_better`, or None."""
    rounds = [a / b for a, b in zip(numerators, denominators, strict=True)]
    return Ratio(
        name=name,
        value=rounded(median(rounds)),
        rounds=[*map(rounded, rounds)],
        goal=goal,
        less_is_better=less_is_better,
    )


def series(
    contender: str,
    measure: str,
    unit: str,
    *samples: float,
    kind: Literal["measured", "computed"] = "measured",
) -> Series:
    """Return a Series of a benchmark's record: a contender's samples of a measure, mostly one for
    each round, rounded to six significant digits, with their unit. They are measured, or of the
    kind `kind`."""
    return Series(
        contender=contender, measure=measure, unit=unit, samples=[*map(rounded, samples)], kind=kind
    )


def rounded(value: float) -> float:
    """Return the value rounded to six significant digits; an int stays as it is."""
    return value if isinstance(value, int) else float(f"{value:.6g}")


def first_losses(measured: Measured) -> dict[str, list[float | None]]:
    """Return a dict contender → list of the losses of the contender's first round, one for each
    iteration, with None in place of a loss that is not finite."""
    return {
        name: [loss if math.isfinite(loss) else None for loss in many[0].losses]
        for name, many in measured.items()
    }


def differing_losses(
    case: str, measured: Measured, allowed: float, compared: int | None = None
) -> list[str]:
    """Return a list of sentences, one for each contender with a loss, in any round, that is not
    finite or differs by more than `allowed` from the loss of the same iteration in the first round
    of the first contender.

    Only the first `compared` iterations count, if given; up to there all rounds must have as many
    losses. `case` begins each sentence.
    """
    first = next(iter(measured))
    expected = measured[first][0].losses[:compared]
    sentences = []
    for name, rounds in measured.items():
        gaps = [
            abs(a - b)
            for timed in rounds
            for a, b in zip(timed.losses[:compared], expected, strict=True)
        ]
        if not all(gap <= allowed for gap in gaps):
            sentences.append(
                f"{case}: losses of {name} differ from those of {first} by up to {max(gaps):.4g}"
            )
    return sentences


def failure(error: BaseException) -> str:
    """Return an error as one line: its type, a colon, and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def gpu_facts() -> dict[str, str]:
    """Return a dict of texts: driver, clocks, power and temperature of the first GPU, with
    nvidia-smi's units and under its names, which `GPU_FACTS` has, and the versions of torch's CUDA
    and cuDNN under `cuda` and `cudnn`. The dict is empty without nvidia-smi. If nvidia-smi fails,
    its message, or an empty text, stands under the first name in `GPU_FACTS`, and the other names
    in it are missing. Raises TimeoutExpired if it takes more than 20 seconds."""
    if shutil.which("nvidia-smi") is None:
        return {}
    import torch

    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    facts = dict(zip(GPU_FACTS, done.stdout.partition("\n")[0].split(", "), strict=False))
    return facts | {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
