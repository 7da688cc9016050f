"""Runs every command of README at smoke size, after `make smoke`. A command it does not know how to run is an error.

`python tests/readme.py` from the checkout; test sets come from MLM_DATA_DIR where it is set.
"""

import os
import re
import shlex
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN_ELSEWHERE = {"make reproduce-8.3b": "make smoke goes the same way", "make test": "the CI script calls it"}
SMOKE_TRAINING = [
    "--set=train.iterations=6",
    "--set=train.warmup_iterations=1",
    "--set=train.validation_samples=16",
    "--set=train.global_batch_size=4",
    "--set=train.microbatch_size=2",
]


def readme_commands() -> list[str]:
    """Every line of the `sh` blocks."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines() if line]


def at_smoke_size(command: str, scratch: Path) -> list[str]:
    """The command with the smoke run's directories, the smallest sizes, and its output files in `scratch`."""
    command = command.replace("recipes/twin.toml", "recipes/smoke.toml").replace("-twin", "-smoke")
    command = command.replace("runs/reproduce-8.3b", "runs/reproduce-8.3b-smoke")
    for option in ("--json", "--out"):
        command = command.replace(f"{option} ", f"{option} {scratch}/")
    for written in ("runs/cleaned", "runs/unique", "runs/overlap"):
        command = command.replace(written, f"{scratch}/{written}")
    words = shlex.split(command.replace("data-available-2019", "data-smoke"))
    program = Path(words[0]).name
    if program == "torchrun":
        words[words.index("8")] = "2"
        words = [str(ROOT / ".venv/bin/torchrun"), "--standalone", *words[1:], "--twin", f"--runs={scratch}"]
        words += ["--set=parallel.tp=2", *SMOKE_TRAINING]
    elif program == "mlm-train" and words[1] == "lr-find":
        words[words.index("--smoke")] = "--twin"
        words += ["--iterations=6", f"--out={scratch}/lr-find", *SMOKE_TRAINING[1:]]
    elif program == "mlm-train" and words[1] not in ("resume", "schedule") and "--dry-run" not in words:
        words = [*words, *SMOKE_TRAINING, "--set=name=355m-readme", f"--runs={scratch}"]
        words[words.index("--smoke")] = "--twin"
    elif program == "mlm-verify" and words[1] == "parallel":
        words[words.index("--smoke")] = "--twin"
    elif program == "mlm-eval" and words[1] not in ("list", "generate"):
        words += ["--limit", "40"]
    elif program == "mlm-experiment" and words[1] == "reproduce" and not {"--dry-run", "--mode"} & {*words}:
        words += ["--smoke"]
    elif program == "mlm-experiment" and words[1] == "run":
        words += [f"--runs={scratch}"]
    elif program == "mlm-experiment" and words[1] == "calibrate":
        words += [f"--out={scratch}/calibration"]
    return words


def main() -> int:
    """Run them in order; the first failure ends it."""
    commands = readme_commands()
    with tempfile.TemporaryDirectory() as folder:
        for command in commands:
            if command in RUN_ELSEWHERE:
                print(f"skip {command} ({RUN_ELSEWHERE[command]})")
                continue
            words, start = at_smoke_size(command, Path(folder)), time.monotonic()
            done = subprocess.run(
                words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
            )
            print(
                f"{'ok  ' if done.returncode == 0 else 'FAIL'} {time.monotonic() - start:5.1f} s  {command}", flush=True
            )
            if done.returncode:
                print(shlex.join(words), done.stdout[-3000:], done.stderr[-3000:], sep="\n")
                return 1
    print(f"{len(commands)} commands of README, none failed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
