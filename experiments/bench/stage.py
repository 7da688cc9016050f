"""Items measured one after the other, each in a process with a time limit, each written down as soon as it ends."""

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from experiments.bench.roofline import PEAK_TFLOPS
from experiments.bench.timing import NOTES, failure, load_average
from experiments.bench.where import gpu_facts, measured_here
from lineage.benchmark import Benchmark, Case, read_benchmark, write_benchmark
from lineage.errors import BadInput, UserError

LEAST_SECONDS = 5.0
"""Left of the deadline for an item to begin."""


class Stage:
    """What was measured of `mlm-bench gpu`, this time and before in the same folder."""

    def __init__(self, out: Path | None, deadline: float | None) -> None:
        """`out` may be a folder of earlier stages; `deadline` is in seconds from now."""
        self.name, self.out, self.failures = "", out, dict[str, str]()
        self._ends = time.monotonic() + deadline if deadline else float("inf")
        self._cases: dict[str, Case] = {}
        self._disagreements: dict[str, None] = {}
        self._load: list[float] = []
        if out:
            try:
                out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BadInput(f"{out} cannot be made: {error.strerror}") from error
            if (out / "gpu.json").exists():
                before = read_benchmark(out / "gpu.json")
                self._cases = {case.name: case for case in before.cases}
                self._disagreements = dict.fromkeys(before.disagreements)

    @property
    def seconds_left(self) -> float:
        """Until the deadline."""
        return self._ends - time.monotonic()

    def begin(self, name: str) -> None:
        """The next items are of this stage."""
        self.name = name

    def attempt(
        self, item: str, seconds: float, function: Callable[..., Any], *arguments: Any, keep: bool = False
    ) -> Any:
        """What a function returns in a process of its own; None where it failed, or the time is over.

        Cases that it returns are kept if so asked.
        """
        limit, start = min(seconds, self.seconds_left), time.monotonic()
        value, why = None, ""
        try:
            if limit < LEAST_SECONDS:
                raise UserError("the deadline came first")
            value = in_new_process(limit, function, *arguments)
        except UserError as error:
            why = self.failures[item] = str(error)
        spent = round(time.monotonic() - start, 2)
        self.say(item, {"seconds": spent} | ({"failed": why} if why else {"result": value}))
        self._load.append(load_average())
        if keep:
            cases = value if isinstance(value, list) else [value] if value else []
            self.keep(*(cases or [Case(name=item, missing={"ours": why})]))
        return value

    def say(self, item: str, values: dict[str, Any]) -> None:
        """A line of JSON, on the terminal and in `gpu.jsonl`."""
        line = to_json({"stage": self.name, "item": item} | values).decode()
        print(line, flush=True)
        if self.out:
            with (self.out / "gpu.jsonl").open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    def keep(self, *cases: Case) -> None:
        """Add cases to the result, in place of those of the same name."""
        self._cases |= {case.name: case for case in cases}
        if self.out:
            write_benchmark(self.out / "gpu.json", self.result)

    def disagree(self, *sentences: str) -> None:
        """Say of what was measured that it is wrong."""
        self._disagreements |= dict.fromkeys(sentences)

    @property
    def result(self) -> Benchmark:
        """Everything so far. Raises UserError where nothing is."""
        if not self._cases:
            raise UserError(
                f"nothing was measured: {'; '.join(f'{item}: {why}' for item, why in self.failures.items())}"
            )
        return Benchmark(
            benchmark="gpu",
            title="One GPU beside torch.compile, the peers' models and its own limits",
            cases=list(self._cases.values()),
            disagreements=list(self._disagreements),
            notes=[note.format(peak=PEAK_TFLOPS) for note in NOTES["gpu"]],
            setting=gpu_facts(),
            load_average=self._load,
            environment=measured_here(),
        )


def in_new_process(seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own. Raises UserError when it fails or takes longer."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            raise UserError(f"it took longer than {seconds:.0f} seconds")
        why, value = ours.recv()
    except EOFError as error:
        process.join()
        raise UserError(f"its process ended with code {process.exitcode}") from error
    finally:
        process.kill()
        process.join()
    if why:
        raise UserError(why)
    return value


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send(("", function(*arguments)))
    except Exception as error:
        pipe.send((failure(error), None))
