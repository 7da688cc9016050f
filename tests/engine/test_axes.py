"""A new kind of axis has every collective or cannot be made; one rank alone is a world of one
thread."""

from typing import Any

import pytest
import torch

from mlm_repro.engine.launch.threads import ThreadAxis, current_rank, run_threads
from mlm_repro.engine.parallel.mesh import MAX, Axis, LoneAxis

NEEDED = sorted(Axis.__abstractmethods__)


@pytest.mark.parametrize("forgotten", NEEDED)
def test_an_axis_that_forgets_a_collective_cannot_be_made(forgotten: str) -> None:
    methods = {name: vars(LoneAxis)[name] for name in NEEDED}
    assert type("Whole", (Axis,), methods)(1, 0).gather_objects("mine") == ["mine"]
    del methods[forgotten]
    with pytest.raises(TypeError, match=f"abstract method '?{forgotten}"):
        type("Forgetful", (Axis,), methods)(1, 0)


def test_one_rank_alone_is_a_world_of_one() -> None:
    assert run_threads(results_in_a_thread, 1) == [results(LoneAxis())]


def results_in_a_thread() -> list[Any]:
    here = current_rank()
    assert here is not None
    return results(ThreadAxis(1, 0, world=here.world, members=(0,)))


def results(axis: Axis) -> list[Any]:
    """Results of the collectives on an axis of one rank."""
    x = torch.arange(6.0).view(3, 2)
    axis.broadcast(x)
    axis.start_all_reduce(x).wait()
    axis.start_reduce(x, 0).wait()
    axis.barrier()
    made = [axis.all_reduce(x.clone(), MAX), axis.all_gather(x, dim=1), axis.reduce_scatter(x), x]
    return [each.tolist() for each in made] + axis.gather_objects("mine")
