"""`mlm-experiment plan`: the fastest layout that fits comes first, and what cannot run is said. `mfu`: every rate leads
back to the others."""

import json
from pathlib import Path

import pytest

from mlm_repro.data_pipeline.files import DATASET, DataCard
from mlm_repro.engine.run.resolved import read_run
from mlm_repro.experiments.simulator.cluster import load_cluster
from mlm_repro.experiments.simulator.planner import (
    OWN,
    model_of_run,
    possible_layouts,
    ranked_layouts,
    token_flops,
    utilisation,
)
from mlm_repro.experiments.simulator.simulate import simulate
from mlm_repro.experiments.simulator.workload import NOT_COSTED, checked_config
from mlm_repro.lineage.files import read_document
from tests.commands import call
from tests.data_pipeline.builds import build, config_for, write_mixed
from tests.engine.small_run import write_toml
from tests.experiments.simulator.test_simulate import SOFTWARE


def test_the_first_layout_is_the_fastest_of_all_that_fit() -> None:
    model, cluster = model_of_run(read_run("8.3b")), load_cluster("dgx-2h-v100")
    choices = ranked_layouts(model, cluster, 64)
    tried = simulate(cluster, list(possible_layouts(model.template, cluster, 64)))
    fitting = [one.seconds / one.probability_fits for one in tried if not one.reason]
    assert [choice.prediction.seconds / choice.prediction.probability_fits for choice in choices] == sorted(fitting)
    assert 0 < len(fitting) < len(tried)  # some do not fit 32 GiB
    assert all(choice.prediction.memory_bytes <= 32 * 2**30 for choice in choices)
    assert len({choice.workload for choice in choices}) == len(choices)
    for choice in choices:
        checked_config(choice.workload)


def test_tensor_parallelism_stays_in_a_node() -> None:
    template = model_of_run(read_run("ptd-p/18.4b")).template
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
    first, *_ = ranked_layouts(model_of_run(read_run(model)), load_cluster(cluster, OWN), gpus)
    assert (first.workload.tp, first.workload.pp, first.workload.zero, first.workload.recompute) == expected
    assert first.workload.sequence_parallel == (first.workload.tp > 1)


def test_a_row_has_the_share_of_the_peak_and_its_columns_stand_apart() -> None:
    done = call({}, "mlm-experiment", "plan", "8.3b", "--cluster", "h100", "--gpus", "64", "--quiet", ends=0)
    rows = [line.split() for line in done.out.splitlines() if line.strip()[:1].isdigit() and " to " in line]
    model, cluster = model_of_run(read_run("8.3b")), load_cluster("h100")
    flops, peak = token_flops(model), cluster.constants.matmul_flops_per_second.value
    for row in rows:
        whole = (flops.parameters + flops.attention) * 512 * 1024 / 64 / peak
        assert float(row[12].rstrip("%")) == pytest.approx(100 * whole / float(row[7]), abs=0.08)
    assert len(rows) == 10


def test_an_epoch_is_of_the_dataset_that_the_file_names(tmp_path: Path) -> None:
    dataset = build(tmp_path, config_for(f"jsonl:{write_mixed(tmp_path, 60)}"), "runs")
    toml = write_toml(tmp_path / "own.toml", dataset)
    tokens = read_document(dataset / DATASET, DataCard).splits["train"].tokens
    assert model_of_run(read_run(toml)).epoch_tokens == tokens
    done = call({}, "mlm-experiment", "plan", str(toml), "--cluster", "h100", "--gpus", "1", "--quiet", ends=0)
    assert f"an epoch is {tokens:,} tokens (the dataset)" in done.out


@pytest.mark.parametrize("command", [("plan",), ("mfu", "--tflops", "400")])
def test_a_llama_is_not_costed(tmp_path: Path, command: tuple[str, ...]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 4096}), encoding="utf-8")
    name, *rate = command
    done = call({}, "mlm-experiment", name, str(path), *rate, "--cluster", "h100", "--gpus", "64", ends=2)
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


GPT2 = model_of_run(read_run("1.2b"))


def row(text: str, name: str) -> list[str]:
    """GFLOP of a token, TFLOP/s of a GPU and percent of the peak by one convention."""
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return line.removeprefix(name).split()


def test_39_tflops_of_2019_are_with_layers_computed_again() -> None:
    """Megatron-LM#27: 528.9 ms on one V100, which the paper's count makes 40.8 TFLOP/s of a batch of 2."""
    text = utilisation(GPT2, load_cluster("dgx-2h-v100"), 1, 2, milliseconds=528.9)
    assert row(text, "whole, layers computed again")[1:] == ["40.81", "31.4%"]
    assert row(text, "attention whole")[1:] == ["31.06", "23.9%"]


def test_the_denominator_is_the_dense_peak() -> None:
    """Megatron-LM#1276: 400 TFLOP/s of an H100 are 40 %, not 20."""
    text = utilisation(GPT2, load_cluster("h100"), 1, 512, tflops=400.0)
    assert row(text, "attention whole")[1:] == ["400", "40.4%"]
    assert "989 TFLOP/s" in text


def test_every_rate_leads_to_the_others() -> None:
    cluster = load_cluster("dgx-a100-80g")
    text = utilisation(GPT2, cluster, 64, 512, milliseconds=1000.0)
    rate = 512 * 1024.0
    flops = token_flops(GPT2)
    tflops = (flops.parameters + flops.attention) * rate / 64 / 1e12
    assert utilisation(GPT2, cluster, 64, 512, tokens_per_second=rate) == text
    assert utilisation(GPT2, cluster, 64, 512, tflops=tflops) == text


def test_the_parts_of_a_token_s_operations_are_the_closed_forms() -> None:
    w, flops = GPT2.template, token_flops(GPT2)
    assert flops.parameters == 6 * (12 * w.layers * w.hidden**2 + w.vocab * w.hidden)
    assert flops.attention == 12 * w.layers * w.hidden * w.seq
    assert flops.again == 24 * w.layers * w.hidden**2 + flops.attention / 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["1.2b"], "give one of"),
        (["1.2b", "--tflops", "400", "--milliseconds", "3"], "give one of"),
        (["1.2b", "--tflops", "0"], "above 0"),
        (["bert-336m", "--tflops", "40"], "is a bert"),
    ],
)
def test_what_cannot_be_said_is_one_sentence(arguments: list[str], words: str) -> None:
    assert words in call({}, "mlm-experiment", "mfu", *arguments, "--cluster", "h100", ends=2).err
