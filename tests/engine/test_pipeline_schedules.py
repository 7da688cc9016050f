"""Schedules are complete, safe and have the bubble and the activations in flight that the papers
give."""

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_repro.engine.cli import format_grid
from mlm_repro.engine.parallel.layout import split_layers
from mlm_repro.engine.pipeline.lowering import Message, lower
from mlm_repro.engine.pipeline.schedule import (
    Compute,
    Op,
    ScheduleName,
    compute_orders,
    forward_orders,
    ideal_bubble,
    peaks_in_flight,
)
from mlm_repro.lineage.errors import BadInput
from tests.engine.pipeline_programs import check_programs

CASES = st.one_of(
    st.tuples(
        st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.just(1), st.integers(1, 24)
    ),
    st.integers(1, 6).flatmap(
        lambda pp: st.tuples(
            st.just("interleaved"),
            st.just(pp),
            st.integers(1, 4),
            st.integers(1, 5).map(lambda k: k * pp),
        )
    ),
)


@settings(max_examples=150)
@given(CASES)
def test_every_schedule_is_safe_and_has_the_papers_bubble(
    case: tuple[ScheduleName, int, int, int],
) -> None:
    name, pp, chunks, microbatches = case
    lowered = lower(compute_orders(name, pp, chunks, microbatches), chunks)
    check_programs(lowered.programs, chunks, microbatches)
    assert lowered.bubble == pytest.approx(ideal_bubble(name, pp, chunks, microbatches), abs=1e-9)
    orders = compute_orders(name, pp, chunks, microbatches)
    counts = [
        accumulate(1 if compute.op is Op.FORWARD else -1 for compute in order) for order in orders
    ]
    assert peaks_in_flight(name, pp, chunks, microbatches) == [max(count) for count in counts]


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 12))
def test_forward_only_programs_pass_every_chunk_in_turn(
    pp: int, chunks: int, microbatches: int
) -> None:
    lowered = lower(forward_orders(pp, chunks, microbatches), chunks)
    check_programs(lowered.programs, chunks, microbatches, [Op.FORWARD])
    for program in lowered.programs:
        computed = [i for i in program if isinstance(i, Compute)]
        assert len(computed) == microbatches * chunks
        assert all(compute.op is Op.FORWARD for compute in computed)


def test_the_interleaved_order_is_the_papers_figure_4() -> None:
    """First rank of 4, 2 chunks, 8 microbatches: warm-up of ten forwards, chunk after chunk in
    groups of four."""
    order = compute_orders("interleaved", 4, 2, 8)[0]
    assert [(c.op, c.microbatch, c.chunk) for c in order[:12]] == [
        *[("F", m, 0) for m in range(4)],
        *[("F", m, 1) for m in range(4)],
        ("F", 4, 0),
        ("F", 5, 0),
        ("F", 6, 0),
        ("B", 0, 1),
    ]


def test_an_order_that_is_no_schedule_is_refused() -> None:
    """One that leaves out a pass, makes one twice, or goes back before it went forward, on any
    rank."""
    for rank in range(3):
        for change, sentence in (
            (lambda order: order.pop(), "leaves out a pass or makes one twice"),
            (lambda order: order.append(order[0]), "leaves out a pass or makes one twice"),
            (lambda order: order.__setitem__(0, order[1]), "leaves out a pass or makes one twice"),
            (lambda order: order.insert(0, order.pop()), "cannot proceed"),
        ):
            orders = compute_orders("1f1b", 3, 1, 4)
            change(orders[rank])
            with pytest.raises(ValueError, match=sentence):
                lower(orders, 1)


def test_planted_faults_are_found() -> None:
    lowered = lower(compute_orders("1f1b", 3, 1, 4), 1)
    for rank, program in enumerate(lowered.programs):
        for position, instruction in enumerate(program):
            broken = [list(p) for p in lowered.programs]
            del broken[rank][position]
            with pytest.raises(ValueError, match="rank"):
                check_programs(broken, 1, 4)
            if isinstance(instruction, Message) and not instruction.send:
                late = [list(p) for p in lowered.programs]
                late[rank].append(late[rank].pop(position))
                with pytest.raises(ValueError, match="rank"):
                    check_programs(late, 1, 4)


@pytest.mark.parametrize(
    ("name", "pp", "chunks", "microbatches", "sentence"),
    [
        ("interleaved", 4, 2, 6, "a multiple of pp = 4 microbatches .*, not 6: it can have 4 or 8"),
        ("interleaved", 4, 2, 3, "a multiple of pp = 4 microbatches .*, not 3: it can have 4$"),
        ("1f1b", 2, 2, 4, "the 1f1b schedule has one chunk, one stage, on each rank, not 2"),
    ],
)
def test_schedules_that_do_not_exist_are_refused(
    name: ScheduleName, pp: int, chunks: int, microbatches: int, sentence: str
) -> None:
    with pytest.raises(BadInput, match=sentence):
        compute_orders(name, pp, chunks, microbatches)


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 4))
def test_stages_hold_each_layer_once_in_order(num_layers: int, pp: int, chunks: int) -> None:
    if num_layers < pp * chunks:
        with pytest.raises(BadInput, match=f"makes {pp * chunks} pipeline stages"):
            split_layers(num_layers, pp, chunks)
        return
    stages = split_layers(num_layers, pp, chunks)
    assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
    sizes = [len(stage.layers) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert (
        [stage.is_first for stage in stages].count(True)
        == [stage.is_last for stage in stages].count(True)
        == 1
    )


def test_the_grid_shows_every_pass() -> None:
    grid = format_grid(lower(compute_orders("1f1b", 2, 1, 3), 1), 1)
    rows = grid.splitlines()
    assert len(rows) == 2
    for row in rows:
        assert all(f"F{m}" in row and row.count(f"B{m}") == 2 for m in range(3))
