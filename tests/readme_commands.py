"""The commands of README and of the documentation's first page, and what they are at smoke size."""

import re
import shlex
from pathlib import Path

from tests.architecture.rooms import ROOT

SMOKE_TRAINING = [
    "--set=train.iterations=6",
    "--set=train.warmup_iterations=1",
    "--set=train.validation_samples=16",
    "--set=train.global_batch_size=4",
    "--set=train.microbatch_size=2",
]


def readme_commands() -> list[str]:
    """Every line of README's `sh` blocks, every command in its tables, and what the documentation's
    first page adds.

    Without those of `make`: they make an environment first, and CI calls what they call.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [
        line
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
        if line
    ]
    lines += re.findall(r"^\|[^`\n]*`(mlm-\w+ [^`]*)`", text, re.MULTILINE)
    start = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    shown = "".join(re.findall(r"```sh\n(.*?)```", start, re.DOTALL))
    lines += re.findall(r"^mlm-.*$", shown, re.MULTILINE)
    return [line for line in dict.fromkeys(lines) if not line.startswith("make ")]


def at_smoke_size(command: str, scratch: Path) -> str:
    """The command with a smoke run's directories, the smallest sizes, and its output files in
    `scratch`."""
    command = command.replace("recipes/twin.toml", "recipes/smoke.toml")
    command = re.sub("(?<!-)-twin", "-smoke", command)
    command = command.replace("runs/reproduce-8.3b", "runs/reproduce-8.3b-smoke")
    command = command.replace("--kept", "runs/reproduce-8.3b-smoke")
    for option in ("--json", "--out"):
        command = command.replace(f"{option} ", f"{option} {scratch}/")
    words = shlex.split(command)
    words[0] = Path(words[0]).name
    match words[0], words[1]:
        case "mlm-train", _:
            words = [*words, *SMOKE_TRAINING, "--set=name=355m-readme", f"--runs={scratch}"]
        case "mlm-verify", "against":
            words += ["--iterations", "3"]
        case "mlm-eval", protocol if protocol != "oracle":
            words += ["--limit", "40"]
    return shlex.join(words)
