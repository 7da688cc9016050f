"""docs/findings.md: `python -m tests.verify.findings SWEEP.jsonl … FOLDER … > docs/findings.md`.

Each finding is looked for again in the releases that are installed, its program is written and run,
and what both say is put on the page, with what the sweeps in the files say. FOLDER has another
release, as `pip install --target FOLDER transformers==5.20.2` puts it there: the finding is looked
for in it too.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from mlm_repro.verify.layouts import run_layouts
from mlm_repro.verify.reproductions import write_reproductions
from mlm_repro.verify.subjects import Asked
from tests.verify.sweep import architectures, table

HEAD = """# Findings

*For whoever trains with transformers, torch or Megatron-Core in parallel: what was seen to differ from a serial run.*

`python -m tests.verify.findings SWEEP.jsonl … FOLDER … > docs/findings.md` looks for each finding again in the installed
releases, runs its program and writes this page; it looks for the finding in other releases too, each installed in a FOLDER
by `pip install --target`. `python -m tests.verify.sweep transformers FILE` makes a sweep, which goes on where it was
stopped. The sweeps of this page are kept in `tests/verify/sweeps`. Each line is what was seen in one release with one
small model. Whether it is meant so is for its authors to say.
"""  # noqa: E501
EVERY = "These are all causal architectures that this release has a tensor-parallel plan for."


class Known(NamedTuple):
    """A finding and what is known of it elsewhere."""

    title: str
    program: str
    fields: str
    microbatches: int
    layout: str
    upstream: str


KNOWN = (
    Known(
        "Norms of queries and keys, with gradients accumulated",
        "transformers",
        "model_type=qwen3",
        2,
        "tp2",
        "none found in one search; NVIDIA-NeMo/Automodel#3822 reduces such gradients once an"
        " update",
    ),
    Known(
        "Norms of queries and keys that the plan leaves out",
        "transformers",
        "model_type=glm4_moe use_qk_norm=True",
        1,
        "tp2",
        "none found in one search",
    ),
    Known(
        "Parameters of an activation",
        "transformers",
        "model_type=apertus",
        1,
        "tp2",
        "none found in one search",
    ),
    Known(
        "Multipliers of Falcon-H1 under FSDP2, in memory that nothing was written to",
        "transformers",
        "model_type=falcon_h1",
        1,
        "fsdp2",
        "none found in one search; huggingface/transformers#45050 mended weights of that kind",
    ),
    Known(
        "Experts divided over ranks, in float64",
        "transformers",
        "model_type=qwen3_moe",
        1,
        "ep2",
        "none found in one search; transformers sets FSDP2's divide factor for experts, the next"
        " finding",
    ),
    Known(
        "FSDP2's divide factor over one rank",
        "torch",
        "reduce_dtype=float16 gradient_divide_factor=2",
        1,
        "dp2",
        "none found in one search; pytorch/pytorch#167178 brought the division over one rank",
    ),
    Known(
        "A learnable softmax",
        "megatron-core",
        "softmax_type=learnable",
        0,
        "tp2",
        "NVIDIA/Megatron-LM#7452, finding 8, of the norm; its equal initial values: not"
        " searched for",
    ),
    Known(
        "Rotary rows of latent attention",
        "megatron-core",
        "multi_latent_attention=True kv_lora_rank=16 qk_pos_emb_head_dim=4 qk_head_dim=8"
        " v_head_dim=8",
        0,
        "tp2",
        "NVIDIA/Megatron-LM#1699 and #6839, both open",
    ),
    Known(
        "A balancing loss with a loss per token",
        "megatron-core",
        "num_moe_experts=4 add_bias_linear=False moe_aux_loss_coeff=0.1"
        " calculate_per_token_loss=True",
        0,
        "tp2-sp",
        "mended by NVIDIA/Megatron-LM#5047",
    ),
)


def in_release(command: str, folder: Path, tensors: set[str]) -> str:
    """What came of the command with the release in the folder: "found", if it names one of the
    tensors, "another finding", "nothing found" or "cannot run" with the reason."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "findings.json")
        done = subprocess.run(
            [Path(sys.executable).with_name("mlm-verify"), *command.split()[1:], "--json", file],
            capture_output=True,
            text=True,
            timeout=600,
            env={**os.environ, "PYTHONPATH": str(folder)},
        )
        if not file.exists():
            return f"cannot run ({done.stderr.strip().splitlines()[-1].removeprefix('error: ')})"
        said = json.loads(file.read_text(encoding="utf-8"))
    if reasons := "; ".join(said["cannot_run"].values()):
        return f"cannot run ({reasons})"
    named = {finding["parameter"] for finding in said["findings"]}
    return "found" if named & tensors else "another finding" if named else "nothing found"


def release_in(folder: Path, program: str) -> str | None:
    """The release of a program that is installed in a folder, or None if it has none."""
    found = folder.glob(f"{program.replace('-', '_')}-*.dist-info")
    return next((path.name.removesuffix(".dist-info").partition("-")[2] for path in found), None)


def section(known: Known, folders: Sequence[Path]) -> str:
    """What the installed release says, and in which of the others in the folders it is found."""
    asked = Asked(known.program, known.fields.split(), known.microbatches)
    with contextlib.redirect_stdout(io.StringIO()):
        report = run_layouts(asked, known.layout, 1234)
    options = " ".join(f"--with {field}" for field in asked.fields)
    count = f" --microbatches {known.microbatches}" if known.microbatches > 1 else ""
    lines = [f"## {known.title}\n", f"{report.subject}; upstream: {known.upstream}.\n"]
    command = f"mlm-verify layouts {known.program} {options} --layouts {known.layout}{count}"
    tensors = {finding.parameter for finding in report.findings}
    others = {release_in(folder, known.program): folder for folder in folders}
    lines += [
        f"{release}: {in_release(command, folder, tensors)}.  "
        for release, folder in others.items()
        if release
    ]
    lines += [""] * (len(lines) > 2) + ["```", f"$ {command}"]
    lines += [re.sub(r"; so .*", "; …", str(finding)) for finding in report.findings] or [
        "nothing found"
    ]
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            written = write_reproductions(report, Path(folder))
        if written:
            done = subprocess.run(
                [sys.executable, written[0]],
                capture_output=True,
                text=True,
                timeout=600,
                check=True,
            )
            lines += [
                "$ python program.py",
                *done.stdout.splitlines(),
                "```",
                "",
                "<details><summary>program.py</summary>",
            ]
            lines += [
                "",
                "```text",
                written[0].read_text(encoding="utf-8").rstrip(),
                "```",
                "",
                "</details>",
            ]
        else:
            lines.append("```")
    return "\n".join(lines) + "\n"


def swept(path: Path) -> str:
    """The section of a sweep: how many cells came out how, and those that are not healthy."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    states = [row["state"] for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    seeds = ", ".join(map(str, sorted({row["seed"] for row in rows})))
    kinds = {row["fields"].split()[0] for row in rows}
    title = f"## Sweep: {rows[0]['program']} {rows[0]['release']}, {path.stem}"
    lines = [title, "", f"{len(kinds)} architectures, {len(rows)} cells, seeds {seeds}: {counts}."]
    if set(states) != {"healthy"}:
        ill = [row for row in rows if row["state"] != "healthy"]
        lines += ["Those that are not healthy:", "", *table(ill)]
    return "\n".join(lines) + "\n"


def missing(path: Path) -> list[str]:
    """The architectures of the installed transformers that a sweep has not come to."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    kinds = {row["fields"].removeprefix("model_type=") for row in rows}
    return [kind for kind in architectures() if kind not in kinds]


def main() -> None:
    """Write the page to standard output."""
    torch.set_num_threads(1)
    print(HEAD)
    given = [*map(Path, sys.argv[1:])]
    for known in KNOWN:
        print(section(known, [path for path in given if path.is_dir()]), flush=True)
    for path in (path for path in given if not path.is_dir()):
        print(swept(path))
        if path.stem == "transformers":
            left = ", ".join(missing(path))
            print(f"Not asked yet: {left}.\n" if left else f"{EVERY}\n")


if __name__ == "__main__":
    main()
