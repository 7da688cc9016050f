"""`mlm-verify against`: engines that train alike are within the tolerance, one with a fault is
not."""

import math
import sys
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

import pytest

from mlm_repro.data_pipeline.files import dataset_digest
from mlm_repro.engine.compare.tensors import curve_tolerance, factor, tensor_tolerance
from mlm_repro.engine.run.resolved import read_run_config
from mlm_repro.experiments.benchmark import AGAINST, MOST, read_benchmark, share_of
from mlm_repro.experiments.files import FORECAST
from mlm_repro.experiments.forecast.trainings import seeds_of
from mlm_repro.lineage.digest import check_seal
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.files import read_object
from mlm_repro.lineage.run import RunDirectory
from mlm_repro.reports.engines import engines_exhibit
from mlm_repro.reports.render import render
from mlm_repro.verify.against import ENGINES, engine_class, run_against
from mlm_repro.verify.megatron_core import core
from mlm_repro.verify.recomputed import RunCheck
from tests.commands import ROOT, Command
from tests.engine.conftest import write_dataset
from tests.verify import faults
from tests.verify.faults import Fault
from tests.verify.transformers_engine import Transformers


@pytest.mark.parametrize(
    ("engine", "layout", "precision"),
    [
        ("megatron-core", "tp2-sp", "fp32"),
        ("megatron-core", "dp2-zero1", "fp32"),
        ("megatron-core", "serial", "bf16"),
        ("transformers", "serial", "fp32"),
    ],
)
def test_engines_that_train_alike_agree(
    engine: str, layout: str, precision: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES, "transformers", Transformers)
    resolved = read_run_config(config, [f"train.precision={precision}"])
    result = run_against(resolved, engine, layout, 3)
    assert result.disagreements == []
    shares = [ratio.value for case in result.cases for ratio in case.ratios]
    assert len(shares) == 3 + 28
    assert 0 < max(shares) <= 1
    curves = {series.contender: series.samples for series in result.cases[0].series}
    assert curves["ours"][0] != curves["ours"][1]
    assert any("cuda" in note for note in result.notes) == (engine == "megatron-core")
    assert result.title.startswith(f"{engine} {version(engine)} beside this engine: ")


def test_a_clone_of_the_engine_is_named_by_its_own_version(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_class("megatron-core")
    monkeypatch.setattr(core("package_info"), "__version__", "0.99.0+mine")
    result = run_against(read_run_config(config), "megatron-core", "serial", 1)
    assert result.title.startswith("megatron-core 0.99.0+mine beside this engine: ")


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (faults.mask_words, "loss: all iterations"),
        (faults.decay_biases, "weights at the end: layers.0.input_layernorm.weight"),
        (faults.resume_schedule, "learning rate: all iterations"),
    ],
)
def test_an_engine_with_a_fault_is_beyond_the_tolerance(
    fault: Fault, found: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_class("megatron-core")
    fault(monkeypatch)
    result = run_against(read_run_config(config, ["train.seed=7"]), "megatron-core", "serial", 3)
    assert any(sentence.startswith(found) for sentence in result.disagreements)


def test_the_run_is_sealed_with_a_record_that_reports_draw(
    verify: Command, config: Path, tmp_path: Path
) -> None:
    done = verify("against", "megatron-core", config, "--iterations", 3, "--out", tmp_path / "runs")
    assert done.code == 0, done.err
    (run,) = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    assert done.out.splitlines()[-1] == f"written: {run}"
    check_seal(run)
    kept = read_benchmark(run / AGAINST)
    assert [case.name for case in kept.cases] == [
        "loss",
        "gradient norm",
        "learning rate",
        "weights at the end",
    ]
    assert b"difference of the losses" in render(engines_exhibit(run)).svg


def test_a_dataset_is_read_and_left_as_it_was(
    verify: Command, config: Path, tmp_path: Path
) -> None:
    dataset = write_dataset(tmp_path / "words")
    before = sorted(dataset.rglob("*"))
    arguments = ("--set", f"data.dataset={dataset}", "--iterations", 1, "--out", tmp_path / "runs")
    done = verify("against", "megatron-core", config, *arguments)
    assert done.code == 0, done.err
    assert sorted(dataset.rglob("*")) == before
    (run,) = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    assert RunDirectory.open(run).manifest["parents"] == {"dataset": dataset_digest(dataset)}
    assert " tokens of " in read_benchmark(run / AGAINST).setting["trained on"]


def test_kept_trainings_beside_megatron_core_are_on_text_as_their_sealed_forecast_says() -> None:
    """Their seed is of the forecast's digest. The loss keeps falling: each fifth of the training is
    below the last."""
    (forecast,) = (ROOT / "results" / "against").glob("engines-forecast-*")
    runs = sorted((ROOT / "results" / "against").glob("against-megatron-core-*"))
    assert len(runs) == 3
    (seed,) = seeds_of(forecast / FORECAST, 1)
    for run in runs:
        manifest, kept = RunDirectory.open(run).manifest, read_benchmark(run / AGAINST)
        assert manifest["config"]["train"]["seed"] == seed
        assert manifest["parents"] == read_object(forecast / FORECAST)["made_of"]
        assert " tokens of installed-docs" in kept.setting["trained on"]
        assert kept.disagreements == []
        losses = {series.contender: series.samples for series in kept.cases[0].series}["ours"]
        fifths = [fmean(losses[place : place + 100]) for place in range(0, 500, 100)]
        assert fifths == sorted(fifths, reverse=True)
        assert losses[-1] < 0.75 * losses[0]
    assert not any(RunCheck(run).broken for run in (forecast, *runs))


def test_the_command_ends_with_code_3_where_engines_differ(
    verify: Command, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_class("megatron-core")
    faults.clip_by_local_norm(monkeypatch)
    done = verify(
        "against",
        "megatron-core",
        config,
        "--layout",
        "tp2",
        "--iterations",
        1,
        "--out",
        tmp_path / "runs",
    )
    assert done.code == 3
    assert done.error.startswith("error: gradient norm: all iterations: the two engines differ by ")
    assert len(list((tmp_path / "runs").iterdir())) == 2  # kept all the same, with its link


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["mamba"], "there is no engine 'mamba' to compare with; there are: megatron-core"),
        (
            ["megatron-core", "--layout", "tp3"],
            "tp3 does not fit: tp = 3 does not divide the 4 attention heads",
        ),
        (
            ["megatron-core", "--layout", "tp2-recompute"],
            "megatron-core is run with 1F1B and without recomputation",
        ),
        (
            ["megatron-core", "--set", "train.precision=fp16"],
            "train.precision = fp16 is not compared with another engine",
        ),
        (
            ["megatron-core", "--set", "train.optimizer=lamb"],
            "only a GPT-2 without options in model.gpt2, with train.optimizer = adam and without"
            " train.rampup_batch_size, can be compared",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(
    arguments: list[str], sentence: str, verify: Command, config: Path, tmp_path: Path
) -> None:
    done = verify("against", arguments[0], config, *arguments[1:], "--out", tmp_path / "runs")
    assert done.code == 2
    assert done.error.startswith(f"error: {sentence}")
    assert not (tmp_path / "runs").exists()


def test_a_package_that_is_missing_or_has_other_names_is_said(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_class("megatron-core")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "megatron.core", None)
        with pytest.raises(BadInput, match=r"this command needs megatron: .*mlm-repro\[test\]"):
            engine_class("megatron-core")
    moved = r"lacks modules or names that this suite uses; version 0\.16\.1 has them: .*"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "megatron.core.tensor_parallel.random", None)
        with pytest.raises(BadInput, match=f"{moved}random"):
            engine_class("megatron-core")
    with monkeypatch.context() as patch:
        patch.delattr(sys.modules["megatron.core.transformer.torch_norm"], "WrappedTorchNorm")
        with pytest.raises(BadInput, match=f"{moved}WrappedTorchNorm"):
            engine_class("megatron-core")


def test_the_tolerance_is_the_formula() -> None:
    assert factor(2) == pytest.approx(4 * 40**0.5)
    spread, size, unit = 3e-6, 2.0, 2**-24
    first, draws = [1.0, -size], [[1.0 + spread / 2, -size], [1.0, -size - spread]]
    for tensor, precision, held in (
        ("loss", "bf16", unit),
        ("updated w", "bf16", 2**-8),
        ("updated w", "fp32", unit),
    ):
        expected = factor(2) * (spread + size * unit) + 2 * held * size
        assert tensor_tolerance(tensor, first, draws, 2, precision) == pytest.approx(expected)
    curve = curve_tolerance([4.0, 2.0, 1.0], [[4.0, 2.0 + spread, 1.0], [4.0, 2.0, 1.0]], 2)
    spreads = zip([0.0, spread, spread], [4.0, 2.0, 1.0], strict=True)  # it does not shrink
    assert curve == pytest.approx([factor(2) * (s + x * unit) + 2 * unit * x for s, x in spreads])


def test_a_difference_that_is_no_number_is_the_largest() -> None:
    for distances in ([math.nan, 0.1], [0.1, math.nan]):
        assert share_of("losses", distances, [1.0, 1.0]).value == MOST
        assert share_of("losses", distances, [0.0, 0.0]).value == MOST
    assert share_of("losses", [0.1, 0.3], [1.0, 2.0]).value == pytest.approx(0.15)
