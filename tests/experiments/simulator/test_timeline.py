"""The walk against the engine's own lowering, against the closed form, and against a longest path."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.pipeline.lowering import lower
from engine.pipeline.schedule import Op, compute_orders
from experiments.simulator.simulate import end_times, makespan_seconds, order_of

SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 4))
DURATIONS = st.floats(0.01, 10.0)


def name_of(chunks: int) -> str:
    return "interleaved" if chunks > 1 else "1f1b"


@given(shape=SHAPES, forward=DURATIONS, backward=DURATIONS)
@settings(max_examples=60)
def test_equal_stages_are_timed_as_the_engine_lowers_them(
    shape: tuple[int, int, int], forward: float, backward: float
) -> None:
    pp, chunks, groups = shape
    microbatches = pp * groups
    stages = pp * chunks
    engine = lower(compute_orders(name_of(chunks), pp, chunks, microbatches), chunks, forward, backward)
    order = order_of(pp, chunks, microbatches)
    walked = end_times(order, np.full(stages, forward), np.full(stages, backward))
    for ends, intervals in zip(walked, engine.timeline, strict=True):
        assert ends.tolist() == pytest.approx([one.end for one in intervals])
    if pp > 1 or chunks == 1:
        closed = (microbatches * chunks + pp - 1) * (forward + backward)
        assert engine.makespan == pytest.approx(closed)


@given(shape=SHAPES, data=st.data())
@settings(max_examples=60)
def test_unequal_stages_take_the_longest_path(shape: tuple[int, int, int], data: st.DataObject) -> None:
    pp, chunks, groups = shape
    microbatches, stages = pp * groups, pp * chunks
    forward, backward = (np.array(data.draw(st.lists(DURATIONS, min_size=stages, max_size=stages))) for _ in range(2))
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
    assert makespan_seconds(order_of(pp, chunks, microbatches), *twice) == pytest.approx([longest, 2 * longest])
