"""A rank with the fault of the variable FAULT, `KIND=VALUE`, in place of the module that the first
argument names."""

import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from mlm_repro.engine.trainer import Trainer
from mlm_repro.lineage.command import run_command


def main() -> None:
    """Run the module's `main`; rank 1 has the fault, rank 0 counts the trainings."""
    module = sys.argv.pop(1)
    kind, _, value = os.environ["FAULT"].partition("=")
    if os.environ["RANK"] == "0":
        print(f"begins {module}", flush=True)
    elif kind == "gpus-of":
        if os.environ["SLURMD_NODENAME"] in value.split("+"):
            run_command(fail_as_a_gpu)
    elif kind == "late":
        time.sleep(float(value))
    elif module == "mlm_repro.engine.cli" and kind == "gpu":
        run_command(fail_as_a_gpu)
    elif module == "mlm_repro.engine.cli" and kind == "killed":
        kill_in(int(value))
    elif module == "mlm_repro.engine.cli" and kind == "slow-while":
        slow_down_while(Path(value))
    elif module == "mlm_repro.engine.cli" and kind == "killed-in-turn":
        counter = Path(os.environ["FAULT_COUNTER"])
        turn = len(counter.read_bytes()) if counter.exists() else 0
        counter.write_bytes(b"x" * (turn + 1))
        iterations = value.split("+")
        if turn < len(iterations):
            kill_in(int(iterations[turn]))
    import_module(module).main()


def fail_as_a_gpu(**_: Any) -> None:
    """What torch says on a GPU that has failed."""
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def slow_down_while(file: Path) -> None:
    """Every iteration takes a tenth of a second longer while the file is there, so that training
    does not end before it is stopped."""
    iterate = Trainer.iterate

    def iterate_slowly(trainer: Trainer, iteration: int) -> Any:
        time.sleep(0.1 * file.exists())
        return iterate(trainer, iteration)

    Trainer.iterate = iterate_slowly  # type: ignore[method-assign]


def kill_in(killed: int) -> None:
    """This rank is killed in an iteration, if it began with the first."""
    iterate, begun = Trainer.iterate, list[int]()

    def iterate_or_die(trainer: Trainer, iteration: int) -> Any:
        begun.append(iteration)
        if iteration + 1 == killed and begun[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return iterate(trainer, iteration)

    Trainer.iterate = iterate_or_die  # type: ignore[method-assign]
