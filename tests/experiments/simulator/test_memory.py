"""A dry run, the advice on memory that does not suffice, a plan and a simulation say the same bytes
of a rank."""

import csv
import re
from itertools import pairwise
from pathlib import Path

import pytest

from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.guard.memory import describe_memory
from mlm_repro.engine.run.resolved import read_run_config, resolve
from mlm_repro.experiments.launch.job import Job
from mlm_repro.experiments.simulator.batch import simulate_file
from mlm_repro.experiments.simulator.cluster import load_cluster
from mlm_repro.experiments.simulator.measurements import COLUMNS
from mlm_repro.experiments.simulator.planner import Choice, format_plan, ranked_layouts
from mlm_repro.experiments.simulator.simulate import simulate
from mlm_repro.experiments.simulator.workload import Workload
from mlm_repro.lineage.config import load_config, override_config
from mlm_repro.lineage.shipped import HOME, Shipped, find_file

MODELS = HOME / "experiments" / "models"
NAMES = sorted(
    path.relative_to(MODELS).with_suffix("").as_posix() for path in MODELS.rglob("*.toml")
)
JOBS = sorted((MODELS.parent / "jobs").glob("*.toml"))
CLUSTER = load_cluster("dgx-a100-80g")


def dry_run_bytes(config: RunConfig, ranks: int, capsys: pytest.CaptureFixture[str]) -> int:
    print(resolve(config, ranks).describe())
    found = re.search(r"^memory per rank +([\d,]+) bytes", capsys.readouterr().out, re.MULTILINE)
    assert found
    return int(found[1].replace(",", ""))


def plan_bytes(config: RunConfig, workload: Workload) -> int:
    (prediction,) = simulate(CLUSTER, [workload], config)
    assert not prediction.reason
    lines = format_plan(
        resolve(config), CLUSTER, [Choice(workload, prediction)], 0.0, 0.0
    ).splitlines()
    header, row = next(pair for pair in pairwise(lines) if pair[0].startswith(" tp"))
    end = header.index("bytes") + len("bytes")
    return int(row[:end].split()[-1].replace(",", ""))


def simulated_bytes(workload: Workload, folder: Path) -> int:
    """Through a row of the file that `mlm-experiment simulate` reads."""
    cells = dict(zip(COLUMNS, (getattr(workload, name) for name in COLUMNS), strict=True))
    rows, out = folder / "rows.csv", folder / "out.csv"
    rows.write_text(
        f"cluster,{','.join(cells)}\ndgx-a100-80g,{','.join(map(str, cells.values()))}\n",
        encoding="utf-8",
    )
    simulate_file(rows, out)
    with out.open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["memory_gib"]) == pytest.approx(int(row["memory_bytes"]) / 2**30, rel=1e-5)
    return int(row["memory_bytes"])


def assert_all_agree(
    config: RunConfig, ranks: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, workload = dry_run_bytes(config, ranks, capsys), Workload.of_run(config, ranks)
    assert plan_bytes(config, workload) == said
    # Without a GPU the copy that checkpoints are written from lies in the same memory.
    run = resolve(config, ranks)
    rows = dict(
        line.rsplit("  ", 1) for line in describe_memory(run).splitlines() if line.endswith(" GiB")
    )
    whole = next(size for name, size in rows.items() if name.startswith("the largest rank"))
    assert whole.strip() == f"{(said + run.memory.copied) / 2**30:.3f} GiB"
    # What a row of a file can say.
    if config.model.family == "gpt2" and not config.parallel.shard_optimizer:
        assert simulated_bytes(workload, folder) == said


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_recipe(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On so many GPUs that each has as many microbatches as the pipeline has ranks, and the two of
    the papers on one group of ranks too."""
    config = read_run_config(find_file(name, Shipped.MODEL))
    parallel = config.parallel
    assert_all_agree(config, parallel.tp * config.train.batch_in_microbatches, tmp_path, capsys)
    if name in ("8.3b", "ptd-p/145.6b"):
        assert_all_agree(config, parallel.tp * parallel.pp, tmp_path, capsys)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_every_shipped_job(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = load_config(path, Job)
    assert_all_agree(job.config(), job.ranks, tmp_path, capsys)


def test_a_run_that_shards_its_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_run_config(
        find_file("2.5b", Shipped.MODEL),
        ["parallel.shard_optimizer=true", "parallel.sequence_parallel=true"],
    )
    assert_all_agree(config, 16, tmp_path, capsys)


@pytest.mark.parametrize("name", ["8.3b", "transformer-xl-75m"])
def test_what_a_plan_chooses_is_what_the_engine_would_hold(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = read_run_config(find_file(name, Shipped.MODEL))
    for w, prediction in ranked_layouts(resolve(config), CLUSTER, 8)[::40]:
        layout = {"tp": w.tp, "pp": w.pp, "chunks": w.chunks, "recompute": w.recompute}
        overrides = [f"parallel.{key}={value}" for key, value in layout.items()]
        overrides.append(f"parallel.schedule={'interleaved' if w.chunks > 1 else '1f1b'}")
        changed = override_config(config, [f"train.microbatch_size={w.micro_batch}", *overrides])
        assert dry_run_bytes(changed, w.gpus, capsys) == prediction.memory_bytes
