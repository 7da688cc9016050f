"""Full size or twins: decided by the hardware, with the reason and the cost said first."""

import math
import re
from itertools import pairwise
from pathlib import Path

import pytest

from mlm_repro.data_pipeline.runner import SHELF
from mlm_repro.engine.config import TwinScale
from mlm_repro.engine.costs import parameter_count, tokens_trained
from mlm_repro.engine.run.files import SUMMARY
from mlm_repro.engine.twin import describe_scale
from mlm_repro.experiments.launch.job import write_launch_files
from mlm_repro.experiments.reproduce.files import LADDER, ReproductionSummary
from mlm_repro.experiments.reproduce.plan import (
    FULL_RECIPE,
    SMOKE,
    TWIN,
    folder_of,
    make_plan,
    model_name,
    training_job,
    training_place,
    twin_rule,
)
from mlm_repro.experiments.reproduce.steps import launch_folder, train_step
from mlm_repro.lineage.errors import BadInput, HardwareMissing
from mlm_repro.lineage.files import read_document
from tests.commands import ROOT, call
from tests.experiments.machines import with_gpus

GPU = {"name": "A GPU"}
SCALE = TwinScale(hidden_size=32, num_heads=8, num_layers=24, vocab_size=49, global_batch_size=32)


def machine(monkeypatch: pytest.MonkeyPatch, count: int, gibibytes: int) -> None:
    gpus = [GPU | {"memory_bytes": gibibytes * 2**30}] * count
    for module in ("experiments.reproduce.plan", "engine.run.resolved"):
        monkeypatch.setattr(f"mlm_repro.{module}.list_gpus", lambda: gpus)


@pytest.mark.parametrize(
    ("target", "count", "gibibytes", "mode", "reason"),
    [
        ("8.3b", 0, 0, "scaled", r"there is no GPU, and 8\.3b needs 8 GPUs of \d+ GiB"),
        ("8.3b", 8, 80, "full", r"8\.3b needs 8 GPUs of \d+ GiB; there are 8 of 80 GiB"),
        ("8.3b", 8, 16, "scaled", r"8\.3b needs 8 GPUs of \d+ GiB; there are 8 of 16 GiB"),
        ("8.3b", 4, 80, "scaled", r"8\.3b needs 8 GPUs of \d+ GiB; there are 4 of 80 GiB"),
        ("355m", 1, 80, "full", r"355m needs 1 GPU of"),
        ("355m", 1, 8, "scaled", r"355m needs 1 GPU of \d+ GiB; there are 1 of 8 GiB"),
    ],
)
def test_the_hardware_decides(
    monkeypatch: pytest.MonkeyPatch, target: str, count: int, gibibytes: int, mode: str, reason: str
) -> None:
    machine(monkeypatch, count, gibibytes)
    plan = make_plan(target, "auto", False, None)
    assert plan.mode == mode
    assert re.search(reason, plan.reason)
    seeds = 1 if mode == "full" else 2
    assert [config.name for config in plan.published] == [
        *LADDER[: LADDER.index(target) + 1]
    ] * seeds
    if mode == "full":
        assert plan.configs == plan.published
        assert plan.recipe == FULL_RECIPE
    else:
        assert {config.twin for config in plan.configs} == {SCALE}
        assert plan.recipe == TWIN.recipe
        with pytest.raises(HardwareMissing, match=reason):
            make_plan(target, "full", False, None)


def test_twins_can_be_asked_for_on_a_large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 8, 80)
    for smoke, mode in ((False, "scaled"), (True, "scaled"), (True, "auto")):
        plan = make_plan("8.3b", mode, smoke, None)
        assert (plan.mode, plan.reason) == ("scaled", "asked for")
        assert plan.size == (SMOKE if smoke else TWIN)


@pytest.mark.parametrize(("smoke", "seeds"), [(False, None), (True, None), (False, 3), (True, 2)])
def test_the_overrides_make_the_planned_configuration(
    smoke: bool, seeds: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlm_repro.engine.run.resolved import read_run_config
    from mlm_repro.lineage.shipped import model_file

    machine(monkeypatch, 0, 0)
    plan = make_plan("8.3b", "auto", smoke, None, seeds)
    found = set()
    for published, config in zip(plan.published, plan.configs, strict=True):
        assert (
            read_run_config(model_file(published.name), plan.overrides(config), twin=True) == config
        )
        mark = f"-seed-{config.train.seed}" if config.train.seed != published.train.seed else ""
        assert config.name == f"{published.name}-{'smoke' if smoke else 'twin'}{mark}"
        assert model_name(config.name) == published.name + mark
        found.add((published.name, config.train.seed))
    first = plan.published[0].train.seed
    assert found == {
        (name, first + further)
        for name in LADDER
        for further in range(seeds or (1 if smoke else 2))
    }
    assert plan.configs[: len(LADDER)] == make_plan("8.3b", "auto", smoke, None, 1).configs


def test_larger_models_have_larger_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 0, 0)
    models = [config.model for config in make_plan("8.3b", "auto", False, None, 1).configs]
    for smaller, larger in pairwise(models):
        assert smaller.num_layers < larger.num_layers
        assert smaller.hidden_size < larger.hidden_size
    recipes = [config.train for config in make_plan("8.3b", "auto", False, None, 1).configs]
    rates = ("learning_rate", "min_learning_rate")
    assert all(
        recipe.model_dump(exclude={*rates}) == recipes[0].model_dump(exclude={*rates})
        for recipe in recipes
    )
    assert sorted((recipe.learning_rate for recipe in recipes), reverse=True) == [
        r.learning_rate for r in recipes
    ]
    largest = make_plan("8.3b", "auto", False, None, 1).configs[-1]
    assert tokens_trained(largest.model, largest.train) >= 5 * parameter_count(largest.model)


def test_twins_have_the_rates_of_the_rule_and_the_deviation_of_their_width() -> None:
    for config in make_plan("8.3b", "scaled", False, None).configs:
        by_size = (parameter_count(config.model) / 171_000) ** -0.423
        by_length = (1200 * 16 * 128 / 1.45e6) ** -0.32
        rate = config.train.learning_rate
        assert rate == pytest.approx(0.00589 * by_size * by_length, rel=0.002)
    kept = read_document(ROOT / "results" / "reproduce-8.3b" / SUMMARY, ReproductionSummary)
    assert twin_rule(config) == kept.twin_rule
    assert config.train.min_learning_rate == pytest.approx(
        config.train.learning_rate / 15, rel=0.01
    )
    assert "the rate of the ladder's rule" in twin_rule(config)
    assert "ladder" not in twin_rule(make_plan("8.3b", "scaled", True, None).configs[0])
    assert config.model.init_std == pytest.approx(
        0.02 * math.sqrt(1024 / config.model.hidden_size), rel=1e-5
    )
    assert "0.02 · √(1024 / width)" in twin_rule(config)


def test_a_dry_run_prints_mode_and_costs_and_does_nothing(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    done = call(
        with_gpus(tmp_path / "bin", 0, 0),
        "mlm-experiment",
        "reproduce",
        "8.3b",
        "--dry-run",
        "--runs",
        runs,
    )
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("mode: scaled (there is no GPU")
    assert describe_scale(SCALE).partition(" and learning rates")[0] in done.out
    for name in LADDER:
        assert re.search(
            rf"^{name}-twin +[\d,]+ +[\d,]+ +\d+\.\d\d +\d\.\d\de\+\d\d +\d+\.\d\d GB +\d",
            done.out,
            re.MULTILINE,
        )
    assert re.search(r"^in all: about .* GB of disk, besides the data$", done.out, re.MULTILINE)
    assert not runs.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["8.3b", "--mode", "full"], 4, "--mode full cannot run here"),
        (["8.3b", "--mode", "full", "--dry-run"], 4, "--mode full cannot run here"),
        (["355m", "--mode", "full", "--smoke"], 2, "--smoke"),
        (["355m", "--mode", "plan"], 2, "--mode"),
        (["355m", "--seeds", "0"], 2, "--seeds"),
        (["1.3b"], 2, "1.3b"),
        (["355m", "--data", "nowhere.toml"], 2, "there is no recipe 'nowhere.toml'"),
        ([], 2, ""),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_written(
    tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    runs = tmp_path / "runs"
    done = call(
        with_gpus(tmp_path / "bin", 0, 0),
        "mlm-experiment",
        "reproduce",
        *arguments,
        "--runs",
        runs,
        ends=code,
    )
    assert words in done.out + done.err
    assert not runs.exists()


def test_the_full_size_is_trained_by_a_launch_file_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, 8, 80)
    plan, data = make_plan("8.3b", "auto", False, None), tmp_path / "data"
    config = plan.configs[-1]
    job = training_job(config, tmp_path, data)
    assert (job.name, job.nodes, job.ranks_per_node, job.dataset) == ("8.3b", 1, 8, data)
    _, torchrun = write_launch_files(job, launch_folder(config, tmp_path))
    assert train_step(plan, config, data, tmp_path) == ["bash", str(torchrun)]
    assert "--nnodes=1 --nproc-per-node=8" in torchrun.read_text(encoding="utf-8")
    with pytest.raises(BadInput, match="--seeds is for twins"):
        make_plan("8.3b", "auto", False, None, 3)


def test_the_main_job_shows_at_most_twelve_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data, one training of each model and the reproduction, each with its link; further seeds; the
    data's shelf."""
    machine(monkeypatch, 0, 0)
    runs = Path("runs")
    configs = make_plan("8.3b", "auto", False, None).configs
    places = [folder_of(config.name, runs) for config in configs]
    shown = [config.name for config, place in zip(configs, places, strict=True) if place == runs]
    assert shown == [f"{name}-twin" for name in LADDER]
    assert {*places} == {runs, runs / "seeds"}
    assert 2 * (1 + len(shown) + 1) + len({"seeds", SHELF}) <= 12
    training = runs / f"{configs[-1].name}-0123abcd"
    assert training_place(training.name, runs) == runs / "seeds" / training.name
