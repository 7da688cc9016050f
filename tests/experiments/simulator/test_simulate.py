"""Predictions: what they depend on, what is refused, and with which reason."""

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_repro.engine.costs import parameter_count
from mlm_repro.engine.pipeline.schedule import Op, compute_orders
from mlm_repro.engine.run.resolved import read_run_config
from mlm_repro.experiments.catalogue import find_experiment
from mlm_repro.experiments.published import published_rows, published_value
from mlm_repro.experiments.simulator.cluster import (
    Cluster,
    Constants,
    Software,
    SoftwareConstants,
    load_cluster,
    machine_of,
)
from mlm_repro.experiments.simulator.measurements import fitted_workloads, timed, workload_of
from mlm_repro.experiments.simulator.simulate import (
    Prediction,
    iteration_parts,
    makespan,
    order_of,
    simulate,
)
from mlm_repro.experiments.simulator.workload import Workload, checked_config, flops_of
from mlm_repro.lineage.config import load_config
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.shipped import HOME, Shipped, find_file

GPT_3 = Workload(768, 1536, 1, 12288, 96, 96, 2048, 8, 8, 12)


CLUSTERS = sorted(path.stem for path in (HOME / "experiments/clusters").glob("*.toml"))


@pytest.fixture(scope="module")
def a100() -> Cluster:
    return load_cluster("dgx-a100-80g")


def predict(cluster: Cluster, **changed: Any) -> Prediction:
    return simulate(cluster, [GPT_3._replace(**changed)])[0]


@pytest.mark.parametrize("name", CLUSTERS)
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
    """A cluster takes another software's constants and intervals and keeps its own hardware's."""
    own, other = load_cluster("dgx-2h-v100"), load_cluster("dgx-2h-v100", name)
    stated = load_config(find_file(name, Shipped.SOFTWARE), Software)
    assert other.software == name
    assert other.intervals == stated.intervals
    for field in type(own.constants).model_fields:
        is_soft = field in SoftwareConstants.model_fields
        assert getattr(other.constants, field) == getattr(
            stated.constants if is_soft else own.constants, field
        )
    assert (own == other) == (name == "megatron-2019")


def test_newer_software_is_predicted_to_be_faster() -> None:
    """Unfused kernels of 2019 against fused ones of 2021 on the same V100s."""
    row = Workload(8, 8, 8, 3072, 32, 72, 1024, 8, 1, 1)
    of_2019, of_2020, of_2021 = (
        simulate(load_cluster("dgx-2h-v100", f"megatron-{year}"), [row])[0].seconds
        for year in (2019, 2020, 2021)
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
    for text in (
        "software = 3",
        'software = "cobol"',
        'extends = "experiments/clusters/h100.toml"\nconstants = 3',
    ):
        (tmp_path / "bad.toml").write_text(text, encoding="utf-8")
        with pytest.raises(BadInput):
            load_cluster(str(tmp_path / "bad.toml"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"gpus": 760}, "tp × pp × dp = 8 × 12 × 8 = 768 is not gpus = 760"),
        ({"heads": 100}, "hidden_size = 12288 is not a multiple of num_heads = 100"),
        ({"tp": 5, "gpus": 480}, "tp = 5 does not divide the 96 attention heads"),
        ({"micro_batch": 7}, "global_batch_size = 1536 is not a multiple of microbatch_size = 7"),
        ({"global_batch": 1540}, "does not divide over 8 data-parallel ranks"),
        ({"pp": 128, "gpus": 8192}, "makes 128 pipeline stages, and the model has only 96 layers"),
        (
            {"chunks": 2, "micro_batch": 64},
            "multiple of pp = 12 microbatches on each data-parallel rank, not 3",
        ),
        ({"pp": 1, "gpus": 64}, "GiB of memory; a GPU has 80.0"),
        ({"recompute": "some"}, "recompute"),
        ({"zero": 2}, "zero = 2 must be 0, 1 or 3"),
        ({"zero": 3}, "zero = 3 is costed with tp = pp = 1"),
        ({"seq": 0}, "model.seq_length: 0 should be greater than or equal to 1"),
        ({"dp": 0, "gpus": 0}, "must be at least 1"),
        ({"dp": -8, "tp": -8}, "must be at least 1"),
        ({"global_batch": 8 * 10**8}, "passes in one iteration"),
    ],
)
def test_what_cannot_run_is_answered_with_the_reason(
    a100: Cluster, changed: dict[str, Any], words: str
) -> None:
    prediction = predict(a100, **changed)
    assert words in prediction.reason
    assert "\n" not in prediction.reason
    if "memory" not in words:  # what does not fit is predicted all the same
        assert prediction == Prediction(reason=prediction.reason)


def test_heads_that_tensor_cores_do_not_take_are_slower(a100: Cluster) -> None:
    """BigScience, hidden size 13,824 and 78 layers on 384 A100s: heads of 216 and 108 took 121 and
    163 s."""
    wide, narrow = (
        predict(
            a100,
            gpus=384,
            global_batch=2048,
            micro_batch=4,
            hidden=13824,
            heads=heads,
            layers=78,
            vocab=250880,
            dp=8,
            pp=6,
        )
        for heads in (64, 128)
    )
    assert 1.2 < narrow.seconds / wide.seconds < 1.8


def test_numbers_agree_with_each_other(a100: Cluster) -> None:
    one = predict(a100)
    assert one.low_seconds < one.seconds < one.high_seconds
    flops = 96 * 1536 * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288))
    assert one.tflops_per_gpu == pytest.approx(flops / one.seconds / 768 / 1e12)
    assert one.tflops_per_gpu == pytest.approx(149, rel=0.08)  # 2021 paper, Table 2


def test_directions(a100: Cluster) -> None:
    """What the 2021 paper finds: Figures 12, 13, 17 and 18, Section 4.1."""
    base = predict(a100)
    assert (
        predict(a100, chunks=2, global_batch=192).seconds < predict(a100, global_batch=192).seconds
    )
    assert predict(a100, scatter_gather=False).seconds > base.seconds
    assert (
        predict(a100, recompute="none", global_batch=96).seconds
        < predict(a100, global_batch=96).seconds
    )
    assert predict(a100, tp=32, pp=3).seconds > 1.5 * base.seconds
    assert predict(a100, dp=16, gpus=1536).seconds == pytest.approx(base.seconds / 2, rel=0.1)


@pytest.mark.parametrize(
    ("name", "relative", "absolute"),
    [("2021/figure-17", 0.05, 0.05), ("2021/figure-18", 0.08, 0.0)],
)
def test_figures_that_no_constant_is_fitted_on(
    a100: Cluster, name: str, relative: float, absolute: float
) -> None:
    """With and without recomputation, to a printed tenth; with and without scatter/gather,
    interleaved."""
    experiment = find_experiment(name)
    (part,) = experiment.parts
    rows = [
        row
        for row in published_rows(experiment, part)
        if (row["series"], row["global_batch"]) != ("recompute", "1")
    ]
    workloads = [
        workload_of(row)._replace(scatter_gather=row["scatter_gather"] != "false") for row in rows
    ]
    for row, workload, one in zip(rows, workloads, simulate(a100, workloads), strict=True):
        ours = {
            "tflops_per_gpu": one.tflops_per_gpu,
            "sequences_per_second": workload.global_batch / one.seconds,
        }
        published = published_value(row, part.simulated[0]).value
        assert ours[part.simulated[0]] == pytest.approx(published, rel=relative, abs=absolute)


def test_figure_7_is_between_kernels_of_2019_and_of_2021() -> None:
    """Scores take its time: heads are half as wide as the narrowest that a constant was fitted on,
    as/h is three times the largest."""
    experiment = find_experiment("2021/figure-7")
    rows = published_rows(experiment, experiment.parts[0])
    workloads = [workload_of(row) for row in rows]
    unfused, fused = (
        [one.tflops_per_gpu for one in simulate(load_cluster("dgx-a100-80g", software), workloads)]
        for software in ("megatron-2019", "megatron-2021")
    )
    for low, row, high in zip(unfused, rows, fused, strict=True):
        assert low < published_value(row, "tflops_per_gpu").value < high
    fitted = fitted_workloads("megatron-2021")
    assert min(w.hidden / w.heads for w in fitted) == 2 * workloads[0].hidden / workloads[0].heads
    assert max(w.heads * w.seq / w.hidden for w in fitted) == pytest.approx(21.3, abs=0.1)


def test_recomputation_costs_at_most_a_third(a100: Cluster) -> None:
    machine = machine_of(a100)
    times = [
        float(iteration_parts(machine, [GPT_3._replace(recompute=mode)]).total[0])
        for mode in ("none", "selective", "full")
    ]
    assert times[0] < times[1] < times[2] < times[0] * 1.37


def test_what_others_ran_on_h100s_is_not_refused() -> None:
    """Up to 65,536 positions: fused attention stores no scores, nor does a layer that is computed
    again."""
    rows = timed("h100")
    for software in ("megatron-core", "this-engine"):
        answers = simulate(load_cluster("h100", software), [row.workload for row in rows])
        assert [one.reason for one in answers] == [""] * len(rows)
    assert max(row.workload.seq for row in rows) == 65536


def test_memory_is_that_of_the_run_whose_layouts_are_simulated(a100: Cluster) -> None:
    """Family and schedule are the run's, sharding is the layout's."""
    config = read_run_config(find_file("1.2b", Shipped.MODEL), ["parallel.shard_optimizer=true"])
    workload = Workload.of_run(config, 8)
    alone, sharded = simulate(a100, [workload._replace(zero=0), workload], config)
    assert sharded.seconds < alone.seconds  # each updates its share
    assert alone.memory_bytes - sharded.memory_bytes == pytest.approx(
        12 * 7 / 8 * parameter_count(config.model)
    )
    gpipe = read_run_config(
        find_file("1.2b", Shipped.MODEL),
        [
            "parallel.pp=2",
            "parallel.schedule=gpipe",
            "parallel.recompute=none",
            "train.microbatch_size=1",
        ],
    )
    assert "GiB of memory" in simulate(a100, [Workload.of_run(gpipe, 2)], gpipe)[0].reason


def test_zero_divides_what_it_says_and_sends_what_it_must(a100: Cluster) -> None:
    """ZeRO paper, Sections 5 and 7: memory falls with each stage; stage 1 sends as much as none
    does, stage 3 half more, but for the embedding, which stays."""
    workload = Workload(64, 128, 2, 4096, 32, 32, 2048, 1, 64, 1)
    machine, stages = machine_of(a100), [workload._replace(zero=zero) for zero in (0, 1, 3)]
    memory = [each.memory_bytes for each in simulate(a100, stages)]
    count = parameter_count(checked_config(workload).model)
    assert memory[0] - memory[1] == pytest.approx(12 * count * 63 / 64)
    assert memory[2] - memory[1] == pytest.approx(8 * 51200 * 4096 - 6 * count * 63 / 64)
    slow = machine.replaced(network_bytes_per_second=1e6, gradient_overlap=0.0)
    sent = (
        iteration_parts(slow, stages).total - iteration_parts(machine, stages).pipeline
    ).tolist()
    assert [each / sent[0] for each in sent[1:]] == pytest.approx([1.0, 1.5], rel=0.02)
    more = [each._replace(global_batch=512) for each in stages]  # four microbatches
    sent = (iteration_parts(slow, more).total - iteration_parts(machine, more).pipeline).tolist()
    assert [each / sent[0] for each in sent[1:]] == pytest.approx([1.0, 6.0], rel=0.02)
    free = iteration_parts(machine.replaced(network_bytes_per_second=1e30), stages)
    assert free.pipeline == pytest.approx([free.pipeline[0]] * 3)


def test_a_transformer_xl_has_its_own_products() -> None:
    """Where nothing else takes time an iteration is the closed form's operations, and the product
    with the encoded distances, which all sequences share."""
    run = read_run_config(find_file("transformer-xl-75m", Shipped.MODEL))
    workload = Workload.of_run(run, 8)
    free = dict.fromkeys(
        (name for name in Constants.model_fields if name.startswith("host_") and "exp" not in name),
        0.0,
    )
    ideal = machine_of(load_cluster("p3dn-v100")).replaced(
        **free, matmul_half_size=0.0, matmul_efficiency=1.0, memory_bytes_per_second=1e30
    )
    seconds = float(iteration_parts(ideal, [workload]).pipeline[0])
    distances = 3 * 2 * 16 * 256 * 512 * 384
    assert seconds * 125e12 == pytest.approx(flops_of(workload) / 8 + distances, rel=1e-6)
    assert checked_config(workload).model.model_copy(update={"vocab_size": 50257}) == run.model
    longer = iteration_parts(ideal, [workload._replace(memory=640)]).pipeline[0]
    assert longer > 1.5 * seconds
    with pytest.raises(BadInput, match="are for family = transformer-xl: leave them out with gpt2"):
        checked_config(GPT_3._replace(memory=128))


def test_no_constant_is_fitted_on_the_machines_of_the_transformer_xl_post() -> None:
    """They run, and more machines that each have as much to do take no less time."""
    experiment, cluster = find_experiment("transformer-xl/machines"), load_cluster("p3dn-v100")
    rows = [
        workload_of(row) for part in experiment.parts for row in published_rows(experiment, part)
    ]
    assert not fitted_workloads(cluster.software) & {*rows}
    seconds = {
        row.gpus: prediction.seconds
        for row, prediction in zip(rows, simulate(cluster, rows), strict=True)
    }
    assert 0 < seconds[64] < seconds[128]


SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 4))
DURATIONS = st.floats(0.01, 10.0)


def name_of(chunks: int) -> str:
    return "interleaved" if chunks > 1 else "1f1b"


@given(shape=SHAPES, data=st.data())
@settings(max_examples=60)
def test_stages_take_the_longest_path(shape: tuple[int, int, int], data: st.DataObject) -> None:
    pp, chunks, groups = shape
    microbatches, stages = pp * groups, pp * chunks
    forward, backward = (
        np.array(data.draw(st.lists(DURATIONS, min_size=stages, max_size=stages))) for _ in range(2)
    )
    orders = compute_orders(name_of(chunks), pp, chunks, microbatches)
    before = {(rank, two): one for rank, order in enumerate(orders) for one, two in pairwise(order)}

    @cache
    def end(rank: int, compute: object) -> float:
        op, microbatch, chunk = compute  # type: ignore[misc]
        stage = chunk * pp + rank
        waits = [end(rank, before[rank, compute])] if (rank, compute) in before else []
        source = stage - 1 if op is Op.FORWARD else stage + 1
        if 0 <= source < stages:
            waits.append(end(source % pp, type(compute)(op, microbatch, source // pp)))  # type: ignore[call-arg]
        return max(waits, default=0.0) + float((forward if op is Op.FORWARD else backward)[stage])

    longest = max(end(rank, order[-1]) for rank, order in enumerate(orders))
    twice = np.stack([forward, 2 * forward]), np.stack([backward, 2 * backward])
    assert makespan()(order_of(pp, chunks, microbatches), *twice) == pytest.approx(
        [longest, 2 * longest]
    )
