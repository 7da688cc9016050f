"""timeline.json: what the last iteration computed when, beside the schedule's plan."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.config import RunConfig
from engine.launch.mesh import build_mesh
from engine.launch.threads import run_threads
from engine.pipeline.schedule import Compute, Op, ScheduleName, compute_orders
from engine.run.files import TIMELINE
from engine.run.resolved import resolve
from engine.trainer import Trainer
from tests.engine.small_run import small_config

PP, MICROBATCHES = 2, 4


def train_on_ranks(config: RunConfig, root: Path) -> Path:
    run = resolve(config, PP)
    directory = run.begin(root)
    Trainer(run, directory, build_mesh(run.layout)).run_to_end()
    return directory.path


def computes(rank: list[list[Any]]) -> list[Compute]:
    return [Compute(Op(op), microbatch, chunk) for op, microbatch, chunk, _, _ in rank]


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_a_run_keeps_the_timeline_of_its_last_iteration(
    schedule: ScheduleName, chunks: int, dataset: Path, tmp_path: Path
) -> None:
    values = small_config(dataset, {"num_layers": 4}, iterations=2, warmup_iterations=1, microbatch_size=2)
    parallel = {"pp": PP, "chunks": chunks, "schedule": schedule}
    config = RunConfig.model_validate(values.model_dump() | {"parallel": parallel})
    run = run_threads(train_on_ranks, PP, config, tmp_path, timeout_seconds=300)[0]
    found = json.loads((run / TIMELINE).read_text(encoding="utf-8"))
    assert (found["iteration"], found["schedule"], found["microbatches"]) == (2, schedule, MICROBATCHES)
    orders = compute_orders(schedule, PP, chunks, MICROBATCHES)
    for timeline in (found["planned"], found["measured"]):
        assert [computes(rank) for rank in timeline] == orders
        for rank in timeline:
            assert all(start < end for *_, start, end in rank)
            assert all(one[4] <= other[3] for one, other in pairwise(rank))
        assert min(rank[0][3] for rank in timeline) == 0
        ends = {(op, microbatch, chunk * PP + rank): (start, end)
                for rank, rows in enumerate(timeline) for op, microbatch, chunk, start, end in rows}  # fmt: skip
        for (op, microbatch, stage), (start, _) in ends.items():
            before = (op, microbatch, stage - 1 if op == "F" else stage + 1)
            assert before not in ends or ends[before][1] <= start + 1e-6  # nothing is computed before its input


def test_one_rank_has_a_timeline_too(uninterrupted: Path) -> None:
    found = json.loads((uninterrupted / TIMELINE).read_text(encoding="utf-8"))
    assert (found["iteration"], found["pp"]) == (60, 1)
    assert [row[:3] for row in found["measured"][0]] == [["F", 0, 0], ["B", 0, 0], ["F", 1, 0], ["B", 1, 0]]
