"""Collectives through shared memory give what gloo gives, and never wait for a rank that is gone."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from engine.launch import shared_memory
from engine.launch.mesh import build_mesh
from engine.launch.shared_memory import PLACE_BYTES, SharedMemoryGroup, share_memory
from engine.parallel.layout import Layout
from engine.torch_names import reduce_scatter_single
from tests.ranks import run_ranks

SIZES = (1, 7, PLACE_BYTES // 8, PLACE_BYTES // 8 + 1, PLACE_BYTES // 3 + 5)


def join(seconds: float = 60.0) -> tuple[dist.ProcessGroup, SharedMemoryGroup]:
    gloo = dist.new_group()
    shared = share_memory(gloo, timedelta(seconds=seconds))
    assert isinstance(shared, SharedMemoryGroup)
    return gloo, shared


def compare() -> list[float]:
    """Every operation of sizes around the shared piece; returns sums, to compare their bits between ranks."""
    gloo, shared = join()
    ranks, rank, sums = dist.get_world_size(), dist.get_rank(), []
    for dtype in (torch.float64, torch.float32, torch.int64):
        for size in SIZES:
            mine = (torch.randn(size * ranks, dtype=torch.float64) * 1000).to(dtype)
            for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
                expected, found = mine.clone(), mine.clone()
                dist.all_reduce(expected, operation, gloo)
                dist.all_reduce(found, operation, shared)
                torch.testing.assert_close(found, expected)
                sums.append(found.double().sum().item())
            expected, found = mine.new_empty(size), mine.new_empty(size)
            reduce_scatter_single(expected, mine, group=gloo)
            reduce_scatter_single(found, mine, group=shared)
            torch.testing.assert_close(found, expected)
            gathered = [torch.empty_like(mine) for _ in range(ranks)]
            dist.all_gather(gathered, mine, group=shared)
            assert torch.equal(gathered[rank], mine)
            total = torch.stack(gathered).sum(0)[rank * size : (rank + 1) * size]
            torch.testing.assert_close(total, expected)
    return sums


@pytest.mark.parametrize("ranks", [2, 3])
def test_results_are_those_of_gloo_and_the_same_bits_on_every_rank(ranks: int) -> None:
    first, *others = run_ranks(compare, ranks)
    assert all(other == first for other in others)


def reduce_half_precision(dtype: torch.dtype) -> list[float]:
    _, shared = join()
    tensor = torch.full((4, 5), 0.1 * (1 + dist.get_rank()), dtype=dtype)
    dist.all_reduce(tensor, group=shared)
    return tensor.view(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_added_in_its_own(dtype: torch.dtype) -> None:
    expected = torch.full((20,), 0.1, dtype=dtype) + torch.full((20,), 0.2, dtype=dtype)
    assert run_ranks(reduce_half_precision, 2, dtype) == [expected.tolist()] * 2


def multiply() -> None:
    _, shared = join()
    with pytest.raises(NotImplementedError, match="do not reduce with"):
        dist.all_reduce(torch.ones(3), dist.ReduceOp.PRODUCT, shared)


def test_an_operation_that_is_not_there_is_refused() -> None:
    run_ranks(multiply, 2)


def failure(shared: dist.ProcessGroup) -> str:
    """What a sum in the group fails with."""
    with pytest.raises(RuntimeError) as error:
        dist.all_reduce(torch.ones(3), group=shared)
    return str(error.value)


def lose_the_last() -> str:
    _, shared = join()
    dist.all_reduce(torch.ones(3), group=shared)
    if dist.get_rank() == dist.get_world_size() - 1:
        shared.close()
        return ""
    return failure(shared)


def test_a_rank_that_is_gone_is_told() -> None:
    answers = run_ranks(lose_the_last, 2)
    assert answers[0] == "connection closed by peer: rank 1 of the group"


def wait_for_the_last() -> str:
    _, shared = join(seconds=0.3)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(2)
        return ""
    return failure(shared)


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_asked() -> None:
    assert run_ranks(wait_for_the_last, 2)[0] == "timed out waiting for rank 1 of the group"


def join_from_elsewhere() -> bool:
    if dist.get_rank() == 1:
        shared_memory._machine = lambda: "another"
    return build_mesh(Layout(tp=2)).tp.shared_memory is None


def test_ranks_of_two_machines_stay_with_gloo() -> None:
    assert run_ranks(join_from_elsewhere, 2) == [True, True]


def named_memory() -> list[str]:
    build_mesh(Layout(tp=2))
    return [name for name in os.listdir("/dev/shm") if name.startswith("mlm")]


def test_nothing_has_a_name_that_could_be_left_behind() -> None:
    assert run_ranks(named_memory, 2) == [[], []]
