"""Scaling measured here stands beside its prediction, and neither is taken for the published machines'."""

from pathlib import Path

import pytest

from experiments.catalogue import find_experiment, load_experiments
from experiments.measured import machine
from experiments.published import workload_rows
from experiments.runner import run_named
from experiments.simulator.cluster import load_cluster
from experiments.simulator.measurements import workload_of
from experiments.simulator.simulate import simulate
from experiments.verdicts import judge, load_results
from lineage.errors import HardwareMissing
from lineage.records import read_records

NAME = "2019/table-8"


def test_measured_and_simulated_stand_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "ROUNDS", 1)
    monkeypatch.setattr(machine, "ITERATIONS", 1)
    monkeypatch.setattr(machine, "available_cores", lambda: 2)
    experiment = find_experiment(NAME)
    run_named([experiment], "scaled", tmp_path)
    (run,) = (path for path in tmp_path.iterdir() if not path.is_symlink())
    records = read_records(run / "records.jsonl")
    assert [(one.x, one.kind) for one in records] == [
        (float(ranks), kind) for ranks in (1, 2, 4) for kind in ("scaled", "simulated")
    ]
    assert [one.value for one in records if one.x == 1] == [1.0, 1.0]
    assert all(one.value > 0 for one in records)
    assert all((one.low is not None) == (one.kind == "simulated" and one.x != 1) for one in records)
    assert ["4 ranks on 2 cores" in one.note for one in records] == [False] * 4 + [True] * 2
    assert all("load average" in one.note for one in records if one.kind == "scaled")
    assert {one.outcome for one in judge([experiment], load_results([tmp_path]))} == {"NOT_RUN"}
    assert len(capfd.readouterr().out.splitlines()) == 1 + len(records)


def test_more_ranks_than_cores_share_them() -> None:
    cluster = load_cluster("cpu")
    row = next(row for row in workload_rows("proxy/weak-scaling") if row["series"] == "proxy, data parallel")
    alone = workload_of(row)
    crowded = alone._replace(gpus=4, dp=4, global_batch=4 * alone.global_batch)
    (one,) = simulate(cluster, [alone])
    assert "more than the cluster's 2" in simulate(cluster, [crowded])[0].reason
    (four,) = simulate(machine.oversubscribed(cluster, 4), [crowded])
    assert four.seconds > 2 * one.seconds
    assert machine.oversubscribed(cluster, 2) is cluster


def test_every_proxy_can_be_predicted() -> None:
    proxies = [part for one in load_experiments().values() for part in one.proxies]
    assert len(proxies) == 3
    for part in proxies:
        for row in workload_rows(part.workloads):
            workload = workload_of(row)
            assert not simulate(machine.oversubscribed(load_cluster("cpu"), workload.gpus), [workload])[0].reason


def test_an_experiment_without_proxies_is_not_scaled(tmp_path: Path) -> None:
    with pytest.raises(HardwareMissing, match="published machines alone"):
        run_named([find_experiment("2021/figure-11")], "scaled", tmp_path)
