"""`mlm-experiment plan`: the fastest layout that fits comes first, and this machine can be measured."""

import json
from pathlib import Path

import numpy as np
import pytest

from engine.run.resolved import read_run
from experiments.measured import machine as measure
from experiments.measured.machine import ALL_REDUCE_BYTES, MATMUL_WIDTHS, SHAPES, SMALL_OPERATIONS, Measured, as_cluster
from experiments.simulator.cluster import cluster_toml, load_cluster, machine_of
from experiments.simulator.compute import matmul_seconds
from experiments.simulator.planner import model_of_run, possible_layouts, ranked_layouts
from experiments.simulator.simulate import iteration_parts, simulate
from experiments.simulator.workload import checked_config
from lineage.environment import available_cores, list_gpus
from lineage.errors import HardwareMissing
from tests.commands import call


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


def test_what_fits_nowhere_is_said() -> None:
    config = model_of_run(read_run("8.3b"))
    with pytest.raises(HardwareMissing, match="GiB of memory; a GPU has 32"):
        ranked_layouts(config, load_cluster("dgx-2h-v100"), 1)
    with pytest.raises(HardwareMissing, match="none divides"):
        ranked_layouts(config, load_cluster("dgx-2h-v100"), 7 * 11 * 13)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["8.3b", "--cluster", "dgx-2h-v100", "--gpus", "512"], 0, "days/epoch"),
        (["8.3b", "--twin", "--cluster", "cpu"], 0, "8.3b-twin"),
        (["8.3b", "--cluster", "dgx-2h-v100", "--gpus", "64", "--software", "megatron-2021"], 0, "megatron-2021"),
        (["8.3b", "--cluster", "dgx-2h-v100", "--gpus", "64", "--software", "cobol"], 2, "no software 'cobol'"),
        (["8.3b", "--cluster", "dgx-2h-v100", "--gpus", "512", "--explain"], 0, "limited by"),
        (["ptd-p/145.6b", "--cluster", "dgx-a100-80g", "--gpus", "1536", "--explain"], 0, "pipeline bubble"),
        (["8.3b", "--cluster", "dgx-2h-v100"], 2, "--gpus"),
        (["8.3b", "--gpus", "8"], 2, "--mine"),
        (["8.3b", "--cluster", "dgx", "--gpus", "8"], 2, "dgx-a100-80g"),
        (["8.3b", "--cluster", "h200", "--gpus", "0"], 2, "equal to 1"),
        (["8.3b", "--cluster", "cpu", "--gpus", "1"], 4, "GiB"),
    ],
)
def test_the_command(arguments: list[str], code: int, words: str) -> None:
    done = call({}, "mlm-experiment", "plan", *arguments, "--quiet", ends=code)
    assert words in done.out + done.err
    assert (done.err == "") == (code == 0)


def test_a_planted_machine_is_recovered(tmp_path: Path) -> None:
    """Benchmarks as a known machine would give them lead back to its constants, and to a file that is read again."""
    like = load_cluster("cpu")
    truth = machine_of(like).replaced(
        matmul_flops_per_second=1e11, matmul_half_size=50.0, matmul_efficiency=0.8, memory_efficiency=0.4,
        memory_bytes_per_second=2e10, host_layer_seconds=30 * 3e-6, host_microbatch_seconds=30 * 3e-6,
        node_latency_seconds=1e-4, node_bus_bytes_per_second=2e9,
    )  # fmt: skip
    widths = np.array(MATMUL_WIDTHS, np.float64)
    alone = matmul_seconds(truth.replaced(matmul_efficiency=1.0), widths, widths, widths)
    measured = Measured(
        matmul=list(zip(MATMUL_WIDTHS, alone.tolist(), strict=True)),
        copy_bytes_per_second=2e10,
        small_operation=3e-6,
        all_reduce=[(size, 1e-4 + 1.5 * size / 2e9) for size in ALL_REDUCE_BYTES],
        iterations=iteration_parts(truth, SHAPES).total.tolist(),
    )
    assert SMALL_OPERATIONS == 30
    cluster = as_cluster(like, measured, ranks=4, memory=2.0**33, title="planted")
    found = machine_of(cluster)
    for name in ("matmul_flops_per_second", "matmul_half_size", "matmul_efficiency", "memory_efficiency",
                 "host_layer_seconds", "node_latency_seconds", "node_bus_bytes_per_second"):  # fmt: skip
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.02), name
    assert (cluster.max_gpus, found.gpus_per_node, found.memory_bytes) == (4, 4.0, 8590000000.0)
    assert cluster.intervals.one_node.low == pytest.approx(1, abs=0.02)
    (tmp_path / "own.toml").write_text(cluster_toml(cluster), encoding="utf-8")
    assert load_cluster(str(tmp_path / "own.toml")) == cluster


def measure_briefly() -> None:
    """Make it so in this process."""
    measure.SECONDS_PER_MEASUREMENT = 0.02
    measure.SHAPES = measure.SHAPES[:3]


def test_this_machine_is_measured(tmp_path: Path) -> None:
    arguments = ("plan", "8.3b", "--twin", "--mine", "--quiet")
    done = call({}, "mlm-experiment", *arguments, folder=tmp_path, prepare=measure_briefly)
    assert done.err == ""
    assert done.code == 0
    assert "measured: runs/this-machine.toml" in done.out
    found = load_cluster(str(tmp_path / "runs" / "this-machine.toml"))
    assert found.max_gpus == (len(list_gpus()) or available_cores())
    assert found.constants.matmul_flops_per_second.value > 1e8
    assert 0.3 < found.intervals.one_node.low <= found.intervals.one_node.high < 3


def test_a_llama_of_hugging_face_is_planned(tmp_path: Path) -> None:
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
             "intermediate_size": 14336, "max_position_embeddings": 8192, "vocab_size": 128256}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **sizes}), encoding="utf-8")
    done = call({}, "mlm-experiment", "plan", str(path), "--cluster", "h100", "--gpus", "64", "--explain", "--quiet")
    assert "8,030,261,248 parameters" in done.out  # as Hugging Face counts Llama 3 8B
    shares = [
        float(line.split("%")[0].split()[-1])
        for line in done.out.splitlines()
        if " s " in line and "%" in line and line.startswith("  ")
    ]
    assert sum(shares) == pytest.approx(100, abs=1)
    for broken in ({"model_type": "mamba", **sizes}, {"model_type": "llama"}):
        path.write_text(json.dumps(broken), encoding="utf-8")
        assert (
            str(path) in call({}, "mlm-experiment", "plan", str(path), "--cluster", "h100", "--gpus", "64", ends=2).err
        )
