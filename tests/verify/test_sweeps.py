"""Sweeps of other engines: architectures and cells in which nothing is found, a release that mended
a fault, and the page of findings."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import ROOT
from tests.verify.findings import swept
from tests.verify.sweep import HEALTHY, cells, main, rows

SWEEPS = ROOT / "tests" / "verify" / "sweeps"
NEWEST = ROOT / ".venv" / "newest"
"""Where docs/layouts.md installs the release that is asked beside the one of the suite."""


def kept(name: str) -> list[dict[str, Any]]:
    """The rows of a kept sweep."""
    return [json.loads(line) for line in (SWEEPS / name).read_text().splitlines()]


@pytest.mark.parametrize("kind", HEALTHY)
def test_fifteen_architectures_are_healthy_on_two_tensor_parallel_ranks(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}, a later one has")
    torch.set_num_threads(1)
    (row,) = rows(("transformers", f"model_type={kind}", 1, "tp2"), 1234)
    assert (row["layout"], row["state"], row["text"]) == ("tp2", "healthy", "")


def test_sixty_cells_are_healthy_with_three_seeds() -> None:
    assert len(HEALTHY) == len(set(HEALTHY)) == 15
    asked = {
        (fields, count, layout)
        for _, fields, count, layouts in cells("healthy")
        for layout in layouts.split()
    }
    answers = kept("healthy.jsonl")
    assert len(asked) == 60
    assert len(answers) == 180
    for seed in (1, 2, 3):
        of_seed = [row for row in answers if row["seed"] == seed]
        assert {(row["fields"], row["microbatches"], row["layout"]) for row in of_seed} == asked
    assert {row["state"] for row in answers} == {"healthy"}


def test_every_architecture_of_the_kept_sweep_was_asked_with_one_and_two_microbatches() -> None:
    rows = kept("transformers.jsonl")
    asked = {(row["fields"], row["microbatches"], row["layout"]) for row in rows}
    kinds = {row["fields"] for row in rows if row["layout"] == "fsdp2"}
    assert len(kinds) == 125
    assert asked >= {(kind, count, "tp2") for kind in kinds for count in (1, 2)}


def test_a_sweep_of_another_release_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "torch.jsonl"
    file.write_text(json.dumps({"release": "1.0"}) + "\n")
    monkeypatch.setattr(sys, "argv", ["sweep", "torch", str(file)])
    with pytest.raises(SystemExit, match=r"is a sweep of torch 1\.0, and .* is installed: name "):
        main()
    assert len(file.read_text().splitlines()) == 1


@pytest.mark.skipif(
    not (NEWEST / "megatron_core-0.19.2.dist-info").is_dir(),
    reason="megatron-core 0.19.2 is not installed in .venv/newest: docs/layouts.md has the command",
)
def test_the_newest_release_has_mended_the_balancing_loss_with_a_loss_per_token() -> None:
    fields = (
        "num_moe_experts=4",
        "add_bias_linear=False",
        "moe_aux_loss_coeff=0.1",
        "calculate_per_token_loss=True",
    )
    options = [part for field in fields for part in ("--with", field)] + ["--layouts", "tp2-sp"]
    command = "import sys; from mlm_repro.verify.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", command, "layouts", "megatron-core", *options],
        env=os.environ | {"PYTHONPATH": f"{NEWEST}"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("megatron-core 0.19.2")
    assert "nothing found: 2 layouts compute" in done.stdout


PAGE = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["transformers", "healthy"])
def test_the_page_has_the_kept_sweeps(name: str) -> None:
    assert swept(SWEEPS / f"{name}.jsonl") in PAGE


def test_a_cause_is_a_line_of_the_page() -> None:
    shown = r"```\n\$ mlm-verify layouts (.*?)\n(.*?)\n\$ python program.py"
    findings = re.findall(shown, PAGE, re.DOTALL)
    assert len(findings) >= 7
    for command, lines in findings:
        probes = [line.split(": ")[1] for line in lines.splitlines()]
        assert probes, command
        assert len(set(probes)) == len(probes), lines
