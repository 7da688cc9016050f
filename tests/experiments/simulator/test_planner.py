"""`mlm-experiment plan`: the fastest layout that fits comes first, and what cannot run is said."""

import json
from pathlib import Path

import pytest

from mlm_repro.data_pipeline.files import DATASET, DataCard
from mlm_repro.engine.costs import flops_per_token
from mlm_repro.engine.run.resolved import read_run
from mlm_repro.experiments.simulator.cluster import load_cluster
from mlm_repro.experiments.simulator.planner import (
    OWN,
    dataset_tokens,
    possible_layouts,
    ranked_layouts,
)
from mlm_repro.experiments.simulator.simulate import simulate
from mlm_repro.experiments.simulator.workload import NOT_COSTED, Workload, checked_config
from mlm_repro.lineage.files import read_document
from tests.commands import call
from tests.data_pipeline.builds import build, config_for, write_mixed
from tests.engine.small_run import write_toml
from tests.experiments.simulator.test_simulate import SOFTWARE


def test_the_first_layout_is_the_fastest_of_all_that_fit() -> None:
    model, cluster = read_run("8.3b"), load_cluster("dgx-2h-v100")
    choices = ranked_layouts(model, cluster, 64)
    tried = simulate(cluster, list(possible_layouts(Workload.of_run(model.config, 1), cluster, 64)))
    fitting = [one.seconds / one.probability_fits for one in tried if not one.reason]
    assert [choice.prediction.seconds / choice.prediction.probability_fits for choice in choices] == sorted(fitting)
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
        (["8.3b", "--cluster", "dgx-2h-v100", "--gpus", "512"], 0, "days/epoch"),
        (["8.3b", "--cluster", "dgx-2h-v100", "--gpus", "64", "--software", "megatron-2021"], 0, "megatron-2021"),
        (["8.3b", "--cluster", "dgx-2h-v100", "--gpus", "64", "--software", "cobol"], 2, "no software 'cobol'"),
        (["8.3b", "--cluster", "dgx-2h-v100", "--gpus", "512", "--explain"], 0, "limited by"),
        (["ptd-p/145.6b", "--cluster", "dgx-a100-80g", "--gpus", "1536", "--explain"], 0, "pipeline bubble"),
        (["8.3b", "--cluster", "dgx-2h-v100"], 2, "--gpus"),
        (["8.3b", "--gpus", "8"], 2, "--cluster"),
        (["8.3b", "--cluster", "dgx", "--gpus", "8"], 2, "dgx-a100-80g"),
        (["8.3b", "--cluster", "h200", "--gpus", "0"], 2, "equal to 1"),
        (["8.3b", "--cluster", "dgx-2h-v100", "--gpus", "1"], 4, "GiB of memory; a GPU has 32"),
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
        ("ptd-p/145.6b", "dgx-a100-80g", 1536, (8, 8, 0, "none")),
    ],
)
def test_the_answer_is_an_experts(model: str, cluster: str, gpus: int, expected: tuple[int, int, int, str]) -> None:
    first, *_ = ranked_layouts(read_run(model), load_cluster(cluster, OWN), gpus)
    assert (first.workload.tp, first.workload.pp, first.workload.zero, first.workload.recompute) == expected
    assert first.workload.sequence_parallel == (first.workload.tp > 1)


def test_a_row_has_the_share_of_the_peak_and_its_columns_stand_apart() -> None:
    done = call({}, "mlm-experiment", "plan", "8.3b", "--cluster", "h100", "--gpus", "64", "--quiet", ends=0)
    rows = [line.split() for line in done.out.splitlines() if line.strip()[:1].isdigit() and " to " in line]
    model, cluster = read_run("8.3b"), load_cluster("h100")
    flops, peak = flops_per_token(model.config.model), cluster.constants.matmul_flops_per_second.value
    for row in rows:
        whole = flops * 512 * 1024 / 64 / peak
        assert float(row[12].rstrip("%")) == pytest.approx(100 * whole / float(row[7]), abs=0.08)
    assert len(rows) == 10


def test_an_epoch_is_of_the_dataset_that_the_file_names(tmp_path: Path) -> None:
    dataset = build(tmp_path, config_for(f"jsonl:{write_mixed(tmp_path, 60)}"), "runs")
    toml = write_toml(tmp_path / "own.toml", dataset)
    tokens = read_document(dataset / DATASET, DataCard).splits["train"].tokens
    assert dataset_tokens(read_run(toml)) == tokens
    done = call({}, "mlm-experiment", "plan", str(toml), "--cluster", "h100", "--gpus", "1", "--quiet", ends=0)
    assert f"an epoch is {tokens:,} tokens (the dataset)" in done.out


def test_a_llama_is_not_costed(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 4096}), encoding="utf-8")
    done = call({}, "mlm-experiment", "plan", str(path), "--cluster", "h100", "--gpus", "64", ends=2)
    assert done.err == f"error: {path}: {NOT_COSTED}\n"
    assert done.out == ""


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
