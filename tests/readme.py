"""Runs the commands of README and of the documentation's first page at smoke size, after `make smoke`.

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
RUN_ELSEWHERE = {
    "make reproduce-8.3b": "make smoke goes the same way",
    "make reproduce-355m": "make smoke goes the same way; the full size needs a GPU",
    "make test": "the CI script calls it",
}
SMOKE_TRAINING = [
    "--set=train.iterations=6",
    "--set=train.warmup_iterations=1",
    "--set=train.validation_samples=16",
    "--set=train.global_batch_size=4",
    "--set=train.microbatch_size=2",
]


def readme_commands() -> list[str]:
    """Every line of README's `sh` blocks, every command in its tables, and what the documentation's first page adds."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines() if line]
    lines += re.findall(r"^\|[^`\n]*`((?:make|mlm-\w+) [^`]*)`", text, re.MULTILINE)
    start = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    shown = "".join(re.findall(r"```sh\n(.*?)```", start, re.DOTALL))
    return lines + re.findall(r"^mlm-.*$", shown, re.MULTILINE)


def at_smoke_size(command: str, scratch: Path) -> list[str]:
    """The command with the smoke run's directories, the smallest sizes, and its output files in `scratch`."""
    command = command.replace("recipes/twin.toml", "recipes/smoke.toml")
    command = re.sub("(?<!-)-twin", "-smoke", command)
    command = command.replace("runs/reproduce-8.3b", "runs/reproduce-8.3b-smoke")
    for option in ("--json", "--out"):
        command = command.replace(f"{option} ", f"{option} {scratch}/")
    words = shlex.split(command)
    words[0] = str(ROOT / ".venv" / "bin" / Path(words[0]).name)
    match Path(words[0]).name, words[1]:
        case "mlm-train", _:
            words = [*words, *SMOKE_TRAINING, "--set=name=355m-readme", f"--runs={scratch}"]
        case "mlm-verify", "against":
            words += ["--iterations", "3"]
        case "mlm-eval", _:
            words += ["--limit", "40"]
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
