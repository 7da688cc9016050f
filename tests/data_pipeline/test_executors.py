"""Where tasks run changes nothing: numbers of workers, sizes of shards, lost processes, a Ray
cluster."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from mlm_repro.data_pipeline.work.executors.local import ATTEMPTS, LocalExecutor
from mlm_repro.data_pipeline.work.executors.ray import RayExecutor
from mlm_repro.data_pipeline.work.tasks import Counts, Settings, WorkTask, run_task
from mlm_repro.lineage.errors import BadInput, Interrupted
from mlm_repro.lineage.lock import LOCK, locked
from tests.data_pipeline.builds import build, config_for, files_of, ledger_of, write_mixed
from tests.processes import hold, tell, tree


def square(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """A task that notes which process did it, and is killed once if it finds the file that says
    so."""
    kill = Path(settings["kill"])
    if settings["number"] == 3 and kill.exists():
        if not settings["always"]:
            kill.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    with Path(settings["log"]).open("a") as log:
        log.write(f"{settings['number']} {os.getpid()}\n")
    (directory / "square").write_text(str(settings["number"] ** 2))
    return {"square": settings["number"] ** 2}


def fail(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    raise BadInput("this cannot be")


def squares(folder: Path, count: int = 8, always: bool = False) -> Iterator[WorkTask]:
    for number in range(count):
        settings = {
            "number": number,
            "kill": str(folder / "kill"),
            "log": str(folder / "log"),
            "always": always,
        }
        yield WorkTask(square, settings, (), folder / "out" / f"{number:05d}")


def test_a_lost_process_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "kill").touch()
    with LocalExecutor(2) as executor:
        done = list(executor.run(squares(tmp_path)))
        assert [each.counts["square"] for each in done] == [number**2 for number in range(8)]
        log = (tmp_path / "log").read_text()
        assert [each.counts["square"] for each in executor.run(squares(tmp_path))] == [
            n**2 for n in range(8)
        ]
    assert (tmp_path / "log").read_text() == log  # the second run repeats nothing
    # The first repeats at most what the other process was doing at the loss.
    assert len(log.splitlines()) <= 9
    assert not list((tmp_path / "out").glob(".*")) or not (tmp_path / "kill").exists()


def test_a_task_that_kills_its_process_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "kill").touch()
    with LocalExecutor(2) as executor, pytest.raises(Interrupted, match=f"killed {ATTEMPTS} times"):
        list(executor.run(squares(tmp_path, always=True)))


def test_a_mistake_crosses_processes_as_it_is(tmp_path: Path) -> None:
    tasks = [WorkTask(fail, {}, (), tmp_path / "0"), WorkTask(fail, {}, (), tmp_path / "1")]
    with LocalExecutor(2) as executor, pytest.raises(BadInput, match="this cannot be"):
        list(executor.run(tasks))
    # Removes what the process had begun that was killed for the other's mistake.
    with locked(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_stage_may_end_early(tmp_path: Path) -> None:
    with LocalExecutor(2) as executor:
        for done in executor.run(squares(tmp_path, 100)):
            if done.counts["square"] == 25:
                break
        assert next(iter(executor.run(squares(tmp_path, 1)))).counts == {"square": 0}
    assert len((tmp_path / "log").read_text().splitlines()) < 50


def test_a_marker_holds_for_its_task_and_files_alone(tmp_path: Path) -> None:
    (task, *_) = squares(tmp_path)
    first = run_task(task)
    assert run_task(task) == first
    log = tmp_path / "log"
    assert len(log.read_text().splitlines()) == 1
    (task.output / "square").write_text("1")
    assert run_task(task) == first
    assert len(log.read_text().splitlines()) == 2
    changed = WorkTask(square, task.settings | {"number": 1}, (), task.output)
    assert run_task(changed).counts == {"square": 1}
    assert (task.output / "square").read_text() == "1"
    (task.output / "DONE").write_text("{}")
    assert run_task(changed).counts == {"square": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("executors")
    write_mixed(made, 150)
    return made


@pytest.fixture(scope="module")
def one(folder: Path) -> Path:
    return build(folder, config_for(f"jsonl:{folder / 'corpus.jsonl'}", "shard_bytes=65536"), "one")


@pytest.mark.parametrize(
    ("workers", "shard_bytes"), [(1, 131072), (2, 65536), (3, 65536), (1, 1 << 20)]
)
def test_workers_and_shards_change_nothing(
    folder: Path, one: Path, workers: int, shard_bytes: int
) -> None:
    config = config_for(
        f"jsonl:{folder / 'corpus.jsonl'}", f"workers={workers}", f"shard_bytes={shard_bytes}"
    )
    other = build(folder, config, f"{workers}-{shard_bytes}")
    assert other.name == one.name
    assert files_of(other) == files_of(one)
    assert ledger_of(other) == ledger_of(one)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two nodes with one worker each, on this machine."""
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    small = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=small)
    made.add_node(**{key: value for key, value in small.items() if key != "include_dashboard"})
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made
    ray.shutdown()
    made.shutdown()


def kill_a_worker(killed: list[int], stop: threading.Event, folder: Path) -> None:
    """Kill a process of this test's cluster that is at a task of the first passes."""
    while not stop.is_set() and not killed:
        has_begun = list(folder.glob("ray/*/.work/prepare/*/DONE"))
        for process in filter(is_at_a_task, tree(os.getpid()) if has_begun else ()):
            held = hold(process)  # it may end its task before a signal comes
            if is_at_a_task(process):
                tell([process], signal.SIGKILL)
                killed.append(process)
            tell(held, signal.SIGCONT)
            if killed:
                break
        time.sleep(0.01)


def is_at_a_task(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"ray::run_task")
    except OSError:
        return False


def test_a_cluster_that_loses_a_worker_gives_the_same_bytes(
    folder: Path, one: Path, cluster: Cluster
) -> None:
    config = config_for(f"jsonl:{folder / 'corpus.jsonl'}", "shard_bytes=65536")
    killed: list[int] = []
    stop = threading.Event()
    thread = threading.Thread(target=kill_a_worker, args=(killed, stop, folder))
    thread.start()
    try:
        other = build(folder, config, "ray", "ray")
    finally:
        stop.set()
        thread.join()
    assert killed
    assert files_of(other) == files_of(one)
    assert ledger_of(other) == ledger_of(one)


def test_a_worker_with_other_code_does_nothing(tmp_path: Path) -> None:
    (task, *_) = squares(tmp_path)
    with pytest.raises(BadInput, match="has other code, libraries or another Python"):
        run_task(task, "0" * 64)
    assert not task.output.exists()
    assert run_task(task, task.digest).counts == {"square": 0}


def test_ray_that_is_unreachable_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(BadInput, match="nothing answers"), RayExecutor(1):
        pass


def test_no_process_is_started_without_a_task(tmp_path: Path) -> None:
    with LocalExecutor(1000) as executor:
        assert len(list(executor.run(squares(tmp_path, 1)))) == 1
        assert len(active_children()) == 1
