"""`mlm-train` says what is wrong in one sentence, with the documented exit code and never a
traceback."""

import json
import re
import shutil
from pathlib import Path

import pytest

from mlm_repro import experiments
from mlm_repro.engine.costs import parameter_count
from mlm_repro.engine.run.resolved import read_run_config, resolve, resolve_begun
from mlm_repro.engine.step import NotFinite
from mlm_repro.lineage.errors import BadInput, Interrupted
from mlm_repro.lineage.run import RunDirectory
from tests.engine.conftest import write_dataset
from tests.engine.small_run import mlm_train, small_config, train, write_toml

MODELS = sorted((Path(experiments.__file__).parent / "models").glob("*.toml"))


def test_a_dry_run_says_what_would_be_trained(dataset: Path, tmp_path: Path) -> None:
    """The configuration with the dataset's vocabulary; every shipped model is looked at in
    tests/architecture."""
    toml = write_toml(tmp_path / "small.toml", dataset)
    code, out, err = mlm_train(toml, "--dry-run", "--runs", tmp_path / "runs", "--ranks", 1)
    assert (code, err) == (0, "")
    run = resolve(read_run_config(toml), 1)
    assert (run.config.model.vocab_size, run.config.model.padded_vocab_size) == (290, 384)
    resolved, _, facts = out.partition("\n}\n")
    assert json.loads(resolved + "}") == run.config.model_dump(mode="json")
    values = dict(
        line.split(None, 1) for line in facts.replace("config digest", "digest").splitlines()
    )
    assert len(values["digest"].strip()) == 64
    assert values["parameters"] == f"{parameter_count(run.config.model):,}"
    assert "attention counted whole" in values["FLOPs"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("stated", "options", "code"),
    [
        ("", ["--set=model.vocab_size=500"], 2),
        ("vocab_size = 500\n", [], 2),
        ("", ["--set=model.vocab_size=290"], 0),
        ("vocab_size = 50000\n", ["--twin"], 0),
        ("", ["--twin", "--set=model.vocab_size=500"], 2),
    ],
)
def test_a_vocabulary_that_contradicts_the_dataset_is_refused(
    stated: str, options: list[str], code: int, dataset: Path, tmp_path: Path
) -> None:
    toml = write_toml(tmp_path / "small.toml", dataset)
    if "--twin" in options:
        shape = {"num_layers": 12, "hidden_size": 512, "num_heads": 16, "seq_length": 256}
        options = [*options, *(f"--set=model.{key}={value}" for key, value in shape.items())]
    toml.write_text(
        toml.read_text(encoding="utf-8").replace("[model]\n", f"[model]\n{stated}"),
        encoding="utf-8",
    )
    ended, out, err = mlm_train(toml, "--dry-run", *options)
    assert ended == code, err
    sentence = f"model.vocab_size = 500 contradicts the dataset {dataset}, with which it is 290"
    assert sentence in err if code else '"vocab_size": 290' in out


def test_the_digest_is_that_of_the_resolved_configuration() -> None:
    first, second, changed = (
        mlm_train(MODELS[0], "--dry-run", *more)[1].split("config digest")[1].split()[0]
        for more in ([], ["--set", "train.seed=1234"], ["--set", "train.seed=1"])
    )
    assert first == second != changed


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.iteratons=5", ["unknown key 'train.iteratons'", "did you mean 'iterations'"]),
        ("train.microbatch_size=3", ["global_batch_size = 8", "microbatch_size = 3"]),
        ("train.warmup_iterations=60", ["warmup_iterations = 60", "iterations = 60"]),
        ("train.keep_checkpoints=0", ["train.keep_checkpoints: 0 should be greater than 0"]),
        ("train.precision=fp8", ["train.precision"]),
        ("train.learning_rate=nan", ["train.learning_rate: nan should be a finite number"]),
        ("train.seed=-1", ["train.seed: -1 should be greater than or equal to 0"]),
        ("parallel.tp=0", ["parallel.tp: 0 should be greater than 0"]),
        ("model.num_heads=5", ["hidden_size = 32", "num_heads = 5"]),
        ("model.dropout=1.0", ["model.dropout: 1.0 should be less than 1"]),
        ("model.init_std=0", ["model.init_std: 0 should be greater than 0"]),
        ("name=a/b", ["name = 'a/b'"]),
    ],
)
def test_an_impossible_configuration_is_refused(
    override: str, words: list[str], dataset: Path, tmp_path: Path
) -> None:
    toml = write_toml(tmp_path / "small.toml", dataset)
    code, out, err = mlm_train(toml, "--set", override, "--runs", tmp_path / "runs", "--ranks", 1)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing, broken = tmp_path / "missing.toml", tmp_path / "broken.toml"
    broken.write_text("name = \n", encoding="utf-8")
    for path, word in (
        (missing, "there is no model"),
        (broken, "not valid TOML"),
        (tmp_path, "cannot be read"),
    ):
        code, _, err = mlm_train(path)
        assert code == 2
        assert str(path) in err
        assert word in err


def test_unknown_options_are_a_usage_error(tmp_path: Path) -> None:
    assert mlm_train(MODELS[0], "--ranks", 0)[0] == 2
    assert mlm_train(MODELS[0], "--nonsense")[0] == 2
    assert mlm_train("--help")[0] == 0


def test_datasets_that_are_not_there_or_not_finished(tmp_path: Path) -> None:
    for dataset, code, sentence in (
        (None, 2, "data.dataset is not set"),
        (tmp_path / "nowhere", 5, f"there is no dataset at {tmp_path / 'nowhere'}"),
        (tmp_path, 6, f"the dataset {tmp_path} is not complete"),
    ):
        toml = write_toml(tmp_path / "small.toml", dataset)
        found, _, err = mlm_train(toml, "--runs", tmp_path / "runs")
        assert found == code
        assert sentence in err
    assert not (tmp_path / "runs").exists()


def test_one_of_two_ranks_says_the_cost_and_quiet_silences_both(
    dataset: Path, tmp_path: Path
) -> None:
    toml = write_toml(tmp_path / "small.toml", dataset)
    short = [
        f"--set=train.{name}"
        for name in ("iterations=4", "warmup_iterations=1", "checkpoint_interval=2")
    ]
    code, out, err = mlm_train(toml, *short, "--ranks", 2, "--runs", tmp_path / "loud")
    assert code == 0, err
    [run] = (path for path in (tmp_path / "loud").iterdir() if not path.is_symlink())
    cost = r"cost: 4 iterations, [\d.]+e\+\d+ FLOPs on 2 ranks; up to [\d.]+ [kM]B of \w+; "
    assert re.fullmatch(cost + re.escape(str(run)), err.splitlines()[0])
    assert err.count("cost: ") == 2
    assert re.search(r"cost: about \d+:\d\d and \S+ MB a rank, by a rehearsed iteration of", err)
    assert out == f"complete: {run}\n"
    assert mlm_train(toml, *short, "--ranks", 2, "--runs", tmp_path / "loud") == (
        0,
        f"already complete: {run}\n",
        "",
    )
    code, out, err = mlm_train(toml, *short, "--ranks", 2, "--runs", tmp_path / "quiet", "--quiet")
    assert (code, out.startswith("complete: "), err) == (0, True, "")


def test_what_is_left_of_a_run_is_its_cost(dataset: Path) -> None:
    run = resolve(small_config(dataset), 1)
    whole, half = (re.search(r"([\d.]+e\+\d+) FLOPs", run.describe_work(done)) for done in (0, 30))
    assert whole
    assert half
    assert float(half[1]) == pytest.approx(float(whole[1]) / 2, rel=0.05)
    assert run.describe_work(30).startswith("30 iterations, ")


def test_a_validation_loss_that_is_no_number_stops_the_run(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFinite, match="the validation loss after iteration 1 is nan") as caught:
        train(small_config(dataset, learning_rate=1e30, validation_interval=1), tmp_path)
    assert caught.value.exit_code == 3
    assert_unsealed_with_valid_metrics(tmp_path / "small")


def assert_unsealed_with_valid_metrics(run: Path) -> None:
    assert not (run / "COMPLETE").exists()
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) >= 2
    for line in lines:
        json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))


def test_resume_refuses_what_it_would_not_go_on_with(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset")
    toml = write_toml(tmp_path / "small.toml", dataset, iterations=6, warmup_iterations=3)
    run = train(read_run_config(toml), tmp_path / "runs").path
    assert mlm_train("resume", tmp_path / "runs" / "small")[0] == 0
    renamed = shutil.copytree(run, run.with_name("renamed"))
    cases = [(tmp_path / "nowhere", 2, "not a run directory"), (tmp_path, 2, "not a run directory")]
    cases.append((renamed, 2, f"was renamed: give it its name again with `mv {renamed} {run}`"))
    for path, code, sentence in cases:
        found, _, err = mlm_train("resume", path)
        assert found == code
        assert sentence in err
    shutil.rmtree(dataset)
    assert mlm_train("resume", run)[0] == 5
    write_dataset(dataset, seed=3)
    code, _, err = mlm_train("resume", run)
    assert code == 6
    assert f"the dataset {dataset} is not the one that" in err
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == sorted(
        ["renamed", "small", run.name]
    )


def test_a_run_whose_settings_mean_something_else_now_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset = write_dataset(tmp_path / "dataset")
    config = small_config(dataset, iterations=6, warmup_iterations=3)
    with pytest.raises(Interrupted):
        train(config, tmp_path, until=3)
    (begun,) = (path for path in tmp_path.glob("small-*"))
    assert "older identity" not in capfd.readouterr().err
    monkeypatch.setattr("mlm_repro.engine.run.resolved.SCHEMA", 2)
    with pytest.raises(
        BadInput,
        match=r"mean something else here \(schema 1 of .* 2\); `mlm-train run CONFIG --cont",
    ):
        resolve_begun(RunDirectory.open(begun, "training"))
    with pytest.raises(Interrupted):
        train(config, tmp_path, until=3)
    note = (
        f"note: {begun} is the same work under an older identity, unfinished: `mlm-train resume"
        f" {begun}` goes on"
    )
    assert note in capfd.readouterr().err
    assert len([path for path in tmp_path.glob("small-*") if path.is_dir()]) == 2


def test_a_key_that_this_program_does_not_have_is_named_with_the_way_on(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "dataset")
    with pytest.raises(Interrupted):
        train(small_config(dataset, iterations=6, warmup_iterations=3), tmp_path, until=3)
    (begun,) = (path for path in tmp_path.glob("small-*"))
    manifest = json.loads((begun / "manifest.json").read_text(encoding="utf-8"))
    manifest["config"]["train"]["of_tomorrow"] = 1
    (begun / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    code, _, err = mlm_train("resume", begun)
    assert code == 2
    assert "unknown key 'train.of_tomorrow'" in err
    assert f"`mlm-train run CONFIG --continue {begun}` goes on in a new run" in err
    toml = write_toml(tmp_path / "small.toml", dataset, iterations=9, warmup_iterations=3)
    code, out, err = mlm_train(toml, "--continue", begun, "--runs", tmp_path / "on", "--ranks", 1)
    assert (code, "train.of_tomorrow, which this program does not know" in err) == (0, True), err
    assert "complete: " in out
