"""Predictions: what they depend on, what is refused, and with which reason."""

from pathlib import Path
from typing import Any

import pytest

from engine.costs import parameter_count
from engine.run.resolved import read_run_config
from experiments.simulator.cluster import Cluster, Software, SoftwareConstants, load_cluster, machine_of
from experiments.simulator.simulate import Prediction, iteration_parts, simulate
from experiments.simulator.workload import Workload
from lineage.config import load_config
from lineage.errors import BadInput
from lineage.installation import HOME
from lineage.shipped import Shipped, find_file

GPT_3 = Workload(768, 1536, 1, 12288, 96, 96, 2048, 8, 8, 12)


@pytest.fixture(scope="module")
def a100() -> Cluster:
    return load_cluster("dgx-a100-80g")


def predict(cluster: Cluster, **changed: Any) -> Prediction:
    return simulate(cluster, [GPT_3._replace(**changed)])[0]


@pytest.mark.parametrize("name", ["dgx-2h-v100", "dgx-a100-80g", "h100", "h200"])
def test_a_cluster_states_where_every_constant_comes_from(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.title
    for field in type(cluster.constants).model_fields:
        constant = getattr(cluster.constants, field)
        assert len(constant.source) > 3, field
    assert cluster.intervals.one_node.low < 1 < cluster.intervals.several_nodes.high


SOFTWARE = sorted(path.stem for path in (HOME / "experiments/software").glob("*.toml"))


@pytest.mark.parametrize("name", SOFTWARE)
def test_hardware_and_software_are_apart(name: str) -> None:
    """A cluster takes another software's constants and intervals and keeps its own hardware's; each software says what
    it is, and states nothing of a machine."""
    own, other = load_cluster("dgx-2h-v100"), load_cluster("dgx-2h-v100", name)
    stated = load_config(find_file(name, Shipped.SOFTWARE), Software)
    assert min(map(len, (stated.title, stated.fuses, stated.overlaps, stated.stores))) > 10
    assert other.software == name
    assert other.intervals == stated.intervals
    for field in type(own.constants).model_fields:
        is_soft = field in SoftwareConstants.model_fields
        assert getattr(other.constants, field) == getattr(stated.constants if is_soft else own.constants, field)
    assert (own == other) == (name == "megatron-2019")


def test_newer_software_is_predicted_to_be_faster() -> None:
    """Unfused kernels of 2019 against fused ones of 2021 on the same V100s."""
    row = Workload(8, 8, 8, 3072, 32, 72, 1024, 8, 1, 1)
    of_2019, of_2020, of_2021 = (
        simulate(load_cluster("dgx-2h-v100", f"megatron-{year}"), [row])[0].seconds for year in (2019, 2020, 2021)
    )
    assert of_2019 == of_2020 > 1.1 * of_2021
    assert simulate(load_cluster("dgx-2h-v100"), [row])[0].seconds == of_2019


def test_what_a_cluster_s_own_file_states_goes_before_its_software(tmp_path: Path) -> None:
    own = 'extends = "experiments/clusters/h100.toml"\n[constants]\n'
    own += 'gradient_overlap = { value = 0.25, kind = "fit", source = "mine" }\n'
    (tmp_path / "own.toml").write_text(own, encoding="utf-8")
    path = str(tmp_path / "own.toml")
    assert load_cluster(path).constants.gradient_overlap.value == 0.25
    assert load_cluster(path).intervals == load_cluster("h100").intervals
    assert load_cluster(path, "megatron-2021").constants.gradient_overlap.source != "mine"
    for text in ("software = 3", 'software = "cobol"', 'extends = "experiments/clusters/h100.toml"\nconstants = 3'):
        (tmp_path / "bad.toml").write_text(text, encoding="utf-8")
        with pytest.raises(BadInput):
            load_cluster(str(tmp_path / "bad.toml"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"gpus": 760}, "tp × pp × dp = 8 × 12 × 8 = 768 is not the 760 GPUs"),
        ({"heads": 100}, "hidden_size = 12288 is not a multiple of num_heads = 100"),
        ({"tp": 5, "gpus": 480}, "tp = 5 does not divide the 96 attention heads"),
        ({"micro_batch": 7}, "global_batch_size = 1536 is not a multiple of microbatch_size = 7"),
        ({"global_batch": 1540}, "does not divide over 8 data-parallel ranks"),
        ({"pp": 128, "gpus": 8192}, "needs at least 128 layers; the model has 96"),
        ({"chunks": 2, "micro_batch": 64}, "multiple of pp = 12 microbatches, not 3"),
        ({"pp": 1, "gpus": 64}, "GiB of memory; a GPU has 80.0"),
        ({"recompute": "some"}, "recompute"),
        ({"seq": 0}, "seq_length = 0 must be at least 1"),
        ({"dp": 0, "gpus": 0}, "must be at least 1"),
        ({"dp": -8, "tp": -8}, "must be at least 1"),
        ({"global_batch": 8 * 10**8}, "passes in one iteration"),
    ],
)
def test_what_cannot_run_is_answered_with_the_reason(a100: Cluster, changed: dict[str, Any], words: str) -> None:
    prediction = predict(a100, **changed)
    assert words in prediction.reason
    assert "\n" not in prediction.reason
    if "memory" not in words:  # what does not fit is predicted all the same
        assert prediction == Prediction(reason=prediction.reason)


def test_one_refused_row_does_not_move_the_others(a100: Cluster) -> None:
    bad = GPT_3._replace(heads=100)
    alone, mixed = simulate(a100, [GPT_3]), simulate(a100, [bad, GPT_3, bad])
    assert mixed[1] == alone[0]
    assert [bool(one.reason) for one in mixed] == [True, False, True]


def test_numbers_agree_with_each_other(a100: Cluster) -> None:
    one = predict(a100)
    assert one.low_seconds < one.seconds < one.high_seconds
    flops = 96 * 1536 * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288))
    assert one.tflops_per_gpu == pytest.approx(flops / one.seconds / 768 / 1e12)
    assert one.tflops_per_gpu == pytest.approx(149, rel=0.08)  # 2021 paper, Table 2


def test_directions(a100: Cluster) -> None:
    """What the 2021 paper finds: Figures 12, 13, 17 and 18, Section 4.1."""
    base = predict(a100)
    assert predict(a100, chunks=2, global_batch=192).seconds < predict(a100, global_batch=192).seconds
    assert predict(a100, scatter_gather=False).seconds > base.seconds
    assert predict(a100, recompute="none", global_batch=96).seconds < predict(a100, global_batch=96).seconds
    assert predict(a100, tp=32, pp=3).seconds > 1.5 * base.seconds
    assert predict(a100, dp=16, gpus=1536).seconds == pytest.approx(base.seconds / 2, rel=0.1)


def test_figure_17_of_2021_with_and_without_recomputation(a100: Cluster) -> None:
    """Sequences per second of the 145B model, printed to a tenth; not among the rows of the fit."""
    printed = {
        "full": {2: 1.0, 4: 1.8, 8: 3.0, 16: 4.3, 32: 5.7, 64: 6.8, 128: 7.4, 256: 7.8},
        "none": {1: 0.7, 2: 1.3, 4: 2.3, 8: 3.9},
    }
    for recompute, rates in printed.items():
        for batch, rate in rates.items():
            workload = Workload(128, batch, 1, 12288, 96, 80, 2048, 8, 1, 16, recompute=recompute)
            assert batch / simulate(a100, [workload])[0].seconds == pytest.approx(rate, rel=0.05, abs=0.05)


def test_figure_18_of_2021_without_scatter_and_gather(a100: Cluster) -> None:
    """TFLOP/s of GPT-3 with interleaving and undivided messages; not among the rows of the fit."""
    for batch, tflops in ((12, 107), (24, 121), (36, 127), (48, 130), (60, 131)):
        workload = Workload(96, batch, 1, 12288, 96, 96, 2048, 8, 1, 12, chunks=4, scatter_gather=False)
        assert simulate(a100, [workload])[0].tflops_per_gpu == pytest.approx(tflops, rel=0.08)


def test_recomputation_costs_at_most_a_third(a100: Cluster) -> None:
    machine = machine_of(a100)
    times = [float(iteration_parts(machine, [GPT_3._replace(recompute=mode)]).total[0])
             for mode in ("none", "selective", "full")]  # fmt: skip
    assert times[0] < times[1] < times[2] < times[0] * 1.37


def test_memory_is_that_of_the_run_whose_layouts_are_simulated(a100: Cluster) -> None:
    """Sharding, family and schedule are the run's."""
    config = read_run_config(find_file("1.2b", Shipped.MODEL), ["parallel.shard_optimizer=true"])
    workload = Workload.of_run(config, 8)
    alone, sharded = (simulate(a100, [workload], run)[0] for run in (None, config))
    assert sharded.seconds == alone.seconds
    assert alone.memory_bytes - sharded.memory_bytes == pytest.approx(12 * 7 / 8 * parameter_count(config.model))
    gpipe = read_run_config(
        find_file("1.2b", Shipped.MODEL), ["parallel.pp=2", "parallel.schedule=gpipe", "train.microbatch_size=1"]
    )
    assert "GiB of memory" in simulate(a100, [Workload.of_run(gpipe, 2)], gpipe)[0].reason
