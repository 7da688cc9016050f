"""The shipped constants are what the fit gives, and are as far off held-out rows as they say."""

from itertools import product

import numpy as np
import pytest

from experiments.simulator.calibrate import A100, V100, a100_file, v100_file, v100_start
from experiments.simulator.cluster import Machine, load_cluster, machine_of
from experiments.simulator.cluster_file import FITTED
from experiments.simulator.fits import (
    A100_CONSTANTS,
    SOFTWARE_OF_2019,
    HeldOut,
    a100_rows,
    cross_validate,
    fit,
    fit_node,
    fit_v100,
    random_folds,
    v100_left_out,
)
from experiments.simulator.measurements import (
    AllReduce,
    Observation,
    all_reduces,
    megatron_2019,
    multi_node,
    predicted,
    ptd_p_table_1,
    published_values,
    single_node,
    v100_rows,
)
from experiments.simulator.workload import Workload

A100_MACHINE, V100_MACHINE = machine_of(load_cluster(A100)), machine_of(load_cluster(V100))


@pytest.fixture(scope="module")
def held_out() -> dict[str, HeldOut]:
    return cross_validate(A100_MACHINE, random_folds(len(single_node()) + len(multi_node())))


def mean_error(machine: Machine, observations: list[Observation]) -> float:
    return float(np.abs(predicted(machine, observations) / published_values(observations) - 1).mean())


def test_the_sets_are_whole() -> None:
    assert [len(rows) for rows in (single_node(), multi_node(), ptd_p_table_1(), all_reduces())] == [724, 61, 10, 154]


@pytest.mark.parametrize(("name", "most"), [("single node", 0.09), ("several nodes", 0.08)])
def test_held_out_rows_are_predicted(held_out: dict[str, HeldOut], name: str, most: float) -> None:
    assert np.abs(1 / held_out[name].ratios - 1).mean() <= most
    assert 0.85 <= held_out[name].covered <= 0.95


def test_the_papers_rows_are_predicted_without_having_been_fitted_on() -> None:
    fitted_on = {(row.experiment, row.workload) for row in (*a100_rows()[0], *v100_rows()[1:])}
    figures = [[one for one in megatron_2019() if one.experiment.endswith(name)] for name in ("figure-1", "figure-5")]
    for machine, rows in ((A100_MACHINE, ptd_p_table_1()), *((V100_MACHINE, rows) for rows in figures)):
        assert len(rows) in (8, 10)
        assert not {(row.experiment, row.workload) for row in rows} & fitted_on
        assert mean_error(machine, rows) <= 0.08


def test_the_fit_from_the_shipped_constants_stays_there() -> None:
    """Fitting again moves no prediction by more than a percent: the file is the fit's answer, not somebody's."""
    rows, weights = a100_rows()
    again = fit(A100_MACHINE, A100_CONSTANTS, rows, weights)
    assert predicted(again, rows) == pytest.approx(predicted(A100_MACHINE, rows), rel=0.01)
    again = fit_v100(v100_start(A100_MACHINE))
    assert predicted(again, v100_rows()) == pytest.approx(predicted(V100_MACHINE, v100_rows()), rel=0.01)


def test_the_shipped_files_are_as_the_command_writes_them(held_out: dict[str, HeldOut]) -> None:
    """Text, sources and layout are the command's; the intervals are those of the folds to a percent."""
    left_out = v100_left_out(v100_start(A100_MACHINE))
    for name, text in ((A100, a100_file(A100_MACHINE, held_out)), (V100, v100_file(V100_MACHINE, left_out))):
        shipped, fresh = (FITTED / f"{name}.toml").read_text(encoding="utf-8").splitlines(), text.splitlines()
        assert len(shipped) == len(fresh)
        for ours, theirs in zip(shipped, fresh, strict=True):
            if ours.startswith(("low = ", "high = ")):
                assert float(ours.split()[-1]) == pytest.approx(float(theirs.split()[-1]), rel=0.02)
            else:
                assert ours == theirs


def test_a_fit_finds_the_constants_behind_its_rows() -> None:
    truth = A100_MACHINE.replaced(matmul_efficiency=0.7, memory_efficiency=0.5, host_layer_seconds=2e-3)
    sizes = product((1, 4), (512, 2048, 8192), (1, 8))
    shapes = [Workload(8, 64, b, h, 16, 12, 1024, t, 8 // t, 1) for b, h, t in sizes]
    times = predicted(truth, [Observation("planted", shape, "iteration_seconds", 1.0) for shape in shapes]).tolist()
    rows = [Observation("planted", shape, "iteration_seconds", time) for shape, time in zip(shapes, times, strict=True)]
    names = ("matmul_efficiency", "memory_efficiency", "host_layer_seconds")
    found = fit(A100_MACHINE, names, rows, np.ones(len(rows)))
    assert [getattr(found, name) for name in names] == pytest.approx([0.7, 0.5, 2e-3], rel=1e-3)


def test_all_reduces_inside_a_server_are_timed() -> None:
    for gpu, machine in (("a100", A100_MACHINE), ("v100", V100_MACHINE)):
        rows = [one for one in all_reduces() if one.gpu == gpu and (gpu == "a100" or one.ranks == 8)]
        again = fit_node(machine, rows)
        assert again.node_bus_bytes_per_second == pytest.approx(machine.node_bus_bytes_per_second, rel=1e-3)
    planted = [AllReduce("x", 4, size, 1e-4 + 1.5 * size / 1e10) for size in (2**10, 2**20, 2**30)]
    found = fit_node(A100_MACHINE, planted)
    assert found.node_bus_bytes_per_second == pytest.approx(1e10, rel=1e-3)


def test_what_the_2019_fit_may_not_move_is_the_a100_s() -> None:
    for name in A100_CONSTANTS:
        if name not in SOFTWARE_OF_2019:
            assert getattr(V100_MACHINE, name) == getattr(A100_MACHINE, name)
