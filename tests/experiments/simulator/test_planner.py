"""`mlm-experiment plan`: the fastest layout that fits comes first, and what cannot run is said."""

import json
import re
import shlex
import time
from pathlib import Path

import pytest

from mlm_repro.engine.costs import flops_per_token
from mlm_repro.engine.run.resolved import read_run, read_run_config
from mlm_repro.experiments.simulator.cluster import load_cluster
from mlm_repro.experiments.simulator.planner import (
    OWN,
    expected_seconds,
    possible_layouts,
    ranked_layouts,
)
from mlm_repro.experiments.simulator.simulate import simulate
from mlm_repro.experiments.simulator.workload import NOT_COSTED, Workload, checked_config
from tests.architecture.rooms import ROOT
from tests.commands import call
from tests.docs.test_examples import blocks
from tests.experiments.simulator.test_simulate import SOFTWARE


def test_the_first_layout_is_the_fastest_of_all_that_fit() -> None:
    model, cluster = read_run("8.3b"), load_cluster("dgx-2h-v100")
    choices = ranked_layouts(model, cluster, 64)
    tried = simulate(cluster, list(possible_layouts(Workload.of_run(model.config, 1), cluster, 64)))
    fitting = [one.seconds / one.probability_fits for one in tried if not one.reason]
    assert [
        choice.prediction.seconds / choice.prediction.probability_fits for choice in choices
    ] == sorted(fitting)
    assert 0 < len(fitting) < len(tried)  # some do not fit 32 GiB
    assert all(choice.prediction.memory_bytes <= 32 * 2**30 for choice in choices)
    assert len({choice.workload for choice in choices}) == len(choices)
    for choice in choices:
        checked_config(choice.workload)


def test_tensor_parallelism_stays_in_a_node() -> None:
    template = Workload.of_run(read_run("ptd-p/18.4b").config, 1)
    layouts = list(possible_layouts(template, load_cluster("dgx-a100-80g"), 256))
    assert {one.tp for one in layouts} == {1, 2, 4, 8}
    assert {one.recompute for one in layouts} == {"none", "selective", "full"}
    assert {one.gpus for one in layouts} == {256}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["8.3b", "--cluster", "dgx-2h-v100", "--gpus", "512"], 0, "GPU-hours"),
        (
            ["8.3b", "--cluster", "dgx-2h-v100", "--gpus", "64", "--software", "megatron-2021"],
            0,
            "megatron-2021",
        ),
        (
            ["8.3b", "--cluster", "dgx-2h-v100", "--gpus", "64", "--software", "cobol"],
            2,
            "no software 'cobol'",
        ),
        (
            ["8.3b", "--cluster", "dgx-2h-v100", "--gpus", "512", "--explain"],
            0,
            "s of the first layout go",
        ),
        (
            ["ptd-p/145.6b", "--cluster", "dgx-a100-80g", "--gpus", "1536", "--explain"],
            0,
            "pipeline bubble",
        ),
        (["8.3b", "--cluster", "dgx-2h-v100"], 2, "--gpus"),
        (["8.3b", "--gpus", "8"], 2, "--cluster"),
        (["8.3b", "--cluster", "dgx", "--gpus", "8"], 2, "dgx-a100-80g"),
        (["8.3b", "--cluster", "h200", "--gpus", "0"], 2, "equal to 1"),
        (
            ["8.3b", "--cluster", "dgx-2h-v100", "--gpus", "1"],
            4,
            "recompute full, lacks 108.1 GiB; pipeline rank 0 needs",
        ),
        (
            ["8.3b", "--cluster", "h100", "--gpus", "64", "--days", "30"],
            0,
            "in 30 days without a failure the first trains ",
        ),
        (
            ["8.3b", "--cluster", "h100", "--gpus", "64", "--tokens", "1e9"],
            0,
            "999,817,216 tokens in batches of 512",
        ),
        (
            ["8.3b", "--cluster", "h100", "--gpus", "64", "--tokens", "15T"],
            2,
            "'--tokens': Input should be a valid number",
        ),
        (
            ["ptd-p/145.6b", "--cluster", "h100", "--gpus", "1024", "--batch", "1000"],
            0,
            "in batches of 1000, on 1024",
        ),
        (["2.5b", "--cluster", "h100", "--gpus", "8", "--batch", "3"], 0, "in batches of 3, on 8"),
        (
            ["8.3b", "--cluster", "h100", "--gpus", "64", "--seq", "4096"],
            0,
            "extrapolated: H100, measured is A100; 4,096 positions",
        ),
        (
            ["8.3b", "--cluster", "h100", "--gpus", "64", "--set", "model.dropout=2"],
            2,
            "8.3b.toml --set model.dropout=2: model.dropout",
        ),
        (["llama3-70b", "--cluster", "h100", "--gpus", "64"], 2, "a llama is not costed"),
        (
            ["8.3b", "--cluster", "dgx-2h-v100", "--gpus", "73"],
            4,
            "none divides the batch and model; on 72 or 74 one does",
        ),
        (["2.5b", "--cluster", "h100", "--gpus", "8"], 0, "why the first: tp 1: 2 takes 1."),
    ],
)
def test_the_command(arguments: list[str], code: int, words: str) -> None:
    done = call({}, "mlm-experiment", "plan", *arguments, "--quiet", ends=code)
    assert words in done.out + done.err
    assert (done.err == "") == (code == 0)


@pytest.mark.parametrize(
    ("model", "cluster", "gpus", "expected"),
    [
        ("355m", "h100", 1, (1, 1, 0, "none")),
        ("2.5b", "h100", 8, (1, 1, 1, "none")),
        ("ptd-p/145.6b", "dgx-a100-80g", 1536, (8, 8, 1, "none")),
    ],
)
def test_the_answer_is_an_experts(
    model: str, cluster: str, gpus: int, expected: tuple[int, int, int, str]
) -> None:
    first, *_ = ranked_layouts(read_run(model), load_cluster(cluster, OWN), gpus)
    assert (
        first.workload.tp,
        first.workload.pp,
        first.workload.zero,
        first.workload.recompute,
    ) == expected
    assert first.workload.sequence_parallel == (first.workload.tp > 1)


@pytest.mark.parametrize(
    ("model", "gpus", "published", "planned", "times"),
    [
        ("1.7b", 32, (1, 1), (1, 1), 1.0),
        (
            "3.6b",
            64,
            (2, 1),
            (1, 1),
            1.08,
        ),  # moments divided over 64 ranks leave room for whole layers
        ("7.5b", 128, (4, 1), (2, 1), 1.13),  # the same, on half of a node's ranks
        (
            "18.4b",
            256,
            (8, 1),
            (1, 4),
            1.06,
        ),  # a miss in kind: stages for tensor parallelism, nearly as fast
        ("39.1b", 512, (8, 2), (8, 1), 1.06),  # without stages there is no bubble
        ("76.1b", 1024, (8, 4), (8, 2), 1.05),
        ("310.1b", 1920, (8, 16), (8, 12), 1.03),
    ],
)
def test_a_published_layout_is_nearly_the_first(
    model: str, gpus: int, published: tuple[int, int], planned: tuple[int, int], times: float
) -> None:
    """Layouts of the 2021 paper's Table 1 (arXiv:2104.04473), whose authors recomputed all and had
    no ZeRO.

    One of seven is the plan; of six the plan has fewer ranks a model, because ZeRO 1 divides the
    optimizer's state.
    """
    choices = ranked_layouts(read_run(f"ptd-p/{model}"), load_cluster("selene", OWN), gpus)
    first = choices[0].workload
    assert (first.tp, first.pp, first.zero) == (*planned, 1)
    theirs = next(
        choice for choice in choices if (choice.workload.tp, choice.workload.pp) == published
    )
    assert times - 0.03 < expected_seconds(theirs) / expected_seconds(choices[0]) <= times


def test_a_row_has_the_share_of_the_peak_and_its_columns_stand_apart() -> None:
    done = call(
        {}, "mlm-experiment", "plan", "8.3b", "--cluster", "h100", "--gpus", "64", "--quiet", ends=0
    )
    rows = [
        line.split()
        for line in done.out.splitlines()
        if line.strip()[:1].isdigit() and " to " in line
    ]
    model, cluster = read_run("8.3b"), load_cluster("h100")
    flops, peak = (
        flops_per_token(model.config.model),
        cluster.constants.matmul_flops_per_second.value,
    )
    for row in rows:
        whole = flops * 512 * 1024 / 64 / peak
        assert float(row[12].rstrip("%")) == pytest.approx(100 * whole / float(row[7]), abs=0.08)
    assert len(rows) == 10


def test_a_llama_is_not_costed(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 4096}), encoding="utf-8")
    done = call(
        {}, "mlm-experiment", "plan", str(path), "--cluster", "h100", "--gpus", "64", ends=2
    )
    assert done.err == (
        f"error: {path} describes another program's model, which the simulator does not cost: name"
        " a shipped model or a TOML file\n"
    )
    assert done.out == ""
    named = call(
        {}, "mlm-experiment", "plan", "llama3-70b", "--cluster", "h100", "--gpus", "64", ends=2
    )
    assert named.err == (
        f"error: llama3-70b is a llama by its name: name another model, as {NOT_COSTED}\n"
    )


def test_a_plan_beyond_what_was_measured_says_so_and_is_less_sure() -> None:
    """By processor, nodes, length and size; inside nothing is said."""
    plans = {}
    for name, cluster in (("8.3b", "dgx-a100-80g"), ("8.3b", "h100"), ("ptd-p/1008b", "selene")):
        gpus = 64 if name == "8.3b" else 3072
        arguments = (name, "--cluster", cluster, "--gpus", str(gpus), "--quiet")
        plans[name, cluster] = call({}, "mlm-experiment", "plan", *arguments, ends=0).out
    inside, processor, size = plans.values()
    assert "extrapolated" not in inside
    assert "extrapolated: H100, measured is A100\n" in processor
    assert "extrapolated: 384 nodes, measured are 1 to 280; 1,00" in size
    for name in SOFTWARE:
        ranges = load_cluster("h100", name).intervals
        for within in (ranges.one_node, ranges.several_nodes):
            assert ranges.extrapolated.low <= within.low
            assert within.high <= ranges.extrapolated.high


def test_uneven_stages_an_export_and_what_failures_leave(tmp_path: Path) -> None:
    """126 layers on 16 stages; the first layout is a run, whose flags Megatron-LM's names state."""
    out = tmp_path / "plan.toml"
    sizes = {"model.num_layers": 126, "model.hidden_size": 16384, "model.num_heads": 128}
    arguments = [word for key, value in sizes.items() for word in ("--set", f"{key}={value}")]
    arguments += [
        "--cluster",
        "h100",
        "--gpus",
        "4096",
        "--batch",
        "2048",
        "--software",
        "megatron-core",
    ]
    started = time.monotonic()
    done = call(
        {},
        "mlm-experiment",
        "plan",
        "ptd-p/145.6b",
        *arguments,
        "--price",
        "2",
        "--out",
        str(out),
        ends=0,
    )
    assert time.monotonic() - started < 30  # 3 s alone on a core
    rows = [
        line.split()
        for line in done.out.splitlines()
        if line.strip()[:1].isdigit() and " to " in line
    ]
    assert any(126 % int(row[1]) for row in rows)
    assert all(
        float(row[-1].replace(",", "")) == pytest.approx(2 * float(row[-2].replace(",", "")), abs=2)
        for row in rows
    )
    said = re.search(
        r"failures: it fails every (\d+):(\d+):\d+ and is saved every .*: ([\d.]+)% of the time",
        done.out,
    )
    assert said
    assert int(said[1]) + int(said[2]) / 60 == pytest.approx(54 * 24 * 16384 / 419 / 4096, abs=0.1)
    config = read_run_config(out)
    assert (config.model.num_layers, config.parallel.tp, config.parallel.pp) == (
        126,
        *map(int, rows[0][:2]),
    )
    flags = call({}, "mlm-train", "to-megatron", str(out), ends=0).out
    assert (
        f"--tensor-model-parallel-size {rows[0][0]} --pipeline-model-parallel-size {rows[0][1]}"
        in flags
    )
    assert "--bf16" in flags


def test_the_page_on_operation_is_followed(tmp_path: Path) -> None:
    """A cluster of one's own, a plan on it, Megatron-LM's flags and a job, as they stand there."""
    page = (
        (ROOT / "docs/operation.md")
        .read_text(encoding="utf-8")
        .partition("## A plan, and a job on a cluster")[2]
    )
    commands, *files = list(blocks(page))[:3]
    for file in files:
        (tmp_path / file.title).write_text(file.text, encoding="utf-8")
    said = [
        call({}, *shlex.split(line), ends=0, folder=tmp_path).out
        for line in commands.text.splitlines()
    ]
    assert "on 1024 of 8 × H100 a node, 4 × 400 Gb/s between nodes" in said[0]
    assert "--tensor-model-parallel-size" in said[1]
    assert "gpt-145b: 128 nodes × 8 ranks" in said[2]
    assert (tmp_path / "runs/launch/jobset.yaml").is_file()
