"""Runs in the formats that others read, as those who define the formats read them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlcroissant
import pytest
from jsonschema import Draft7Validator

from lineage.digest import check_seal, seal, sha256_file
from lineage.errors import UserError
from lineage.run import RunDirectory
from reports.exports import FORMS, export
from tests.data_pipeline.builds import build, config_for, write_mixed
from tests.reports.reproduction import WITHOUT_TORCH, write_reproduction
from tests.reports.runs import spoil

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "results" / "reproduce-8.3b"
SCHEMA = Path(__file__).parent / "every-eval-ever-0.3.0" / "eval.schema.json"
"""As the package every-eval-ever 0.3.0 has it, unchanged, under the licence beside it."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    return build(folder, config_for(f"jsonl:{write_mixed(folder, 60)}"), "runs")


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def files_of(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}


def test_croissant_gives_the_documents_of_a_dataset(dataset: Path) -> None:
    place = export(dataset, "croissant", None)
    assert place == dataset.parent / f"{dataset.name}-croissant.json"
    found = mlcroissant.Dataset(jsonld=place)
    assert not found.metadata.ctx.issues.errors
    records = [
        {name.removeprefix("valid/"): value.decode() for name, value in record.items()}
        for record in found.records("valid")
    ]
    lines = (dataset / "documents" / "valid.jsonl").read_text(encoding="utf-8").splitlines()
    assert records == [json.loads(line) for line in lines]
    assert len(records) > 0
    objects = {one.name: one for one in found.metadata.file_objects}
    assert objects.keys() == files_of(dataset)
    for name, one in objects.items():
        assert (one.sha256, int(one.content_size)) == (sha256_file(dataset / name), (dataset / name).stat().st_size)
        assert sha256_file(place.parent / one.content_url) == one.sha256
    ledger = read(dataset / "ledger.json")
    near = next(stage for stage in ledger["stages"] if stage["name"] == "deduplicate")
    sentence = f"After deduplicate there were {near['documents_out']} (dropped: "
    assert sentence in found.metadata.description
    assert f"Split valid: {len(records)} documents" in found.metadata.description
    assert found.metadata.license is None


def test_croissant_finds_the_files_from_another_folder(dataset: Path, tmp_path: Path) -> None:
    place = export(dataset, "croissant", tmp_path / "elsewhere" / "data.json")
    urls = [one["contentUrl"] for one in read(place)["distribution"]]
    assert all((place.parent / url).is_file() and not Path(url).is_absolute() for url in urls)


def test_every_evaluation_follows_the_published_schema(tmp_path: Path) -> None:
    place = export(KEPT, "every-eval-ever", tmp_path / "evaluations")
    validator = Draft7Validator(read(SCHEMA))
    summary, models = read(KEPT / "summary.json"), {}
    for path in place.rglob("*.json"):
        log = read(path)
        assert list(validator.iter_errors(log)) == []
        assert list(validator.iter_errors({**log, "kind": "scaled"})) != []
        assert str(path.parent.relative_to(place)) == f"data/reproduce-8.3b/{log['model_info']['id']}"
        models[log["model_info"]["name"]] = log
    assert models.keys() == {model["run"] for model in summary["models"]}
    for model in summary["models"]:
        log = models[model["run"]]
        assert log["model_info"]["additional_details"]["parameters"] == str(model["trained"]["parameters"])
        results = {one["evaluation_result_id"]: one for one in log["evaluation_results"]}
        for task, metric in (("wikitext103", "perplexity"), ("wikitext103", "bits_per_byte"), ("lambada", "accuracy")):
            kept, found = read(KEPT / "evaluations" / f"{model['name']}-{task}.json"), results[f"{task}/{metric}"]
            details = found["score_details"]["details"]
            assert found["score_details"]["score"] == kept[metric]
            assert found["metric_config"]["evaluation_description"] == kept["protocol"]
            assert details["kind"] == kept["kind"]
            assert details["partial"] == str(kept["partial"])
            assert details["checkpoint_digest"] == kept["checkpoint_digest"] == model["checkpoint_digest"]
            assert found["source_data"]["additional_details"]["sha256"] == kept["data_digest"]
        error = results["lambada/accuracy"]["score_details"]["uncertainty"]["standard_error"]["value"]
        assert error == read(KEPT / "evaluations" / f"{model['name']}-lambada.json")["standard_error"]


def test_a_stand_in_keeps_its_own_name(tmp_path: Path) -> None:
    run = _resealed(tmp_path, "evaluations/8.3b-wikitext103.json", task="heldout-perplexity")
    place = export(run, "every-eval-ever", tmp_path / "out")
    names = {one["evaluation_name"] for path in place.rglob("*.json") for one in read(path)["evaluation_results"]}
    assert names == {"heldout-perplexity", "lambada"}


def test_an_evaluation_of_no_model_is_not_left_out(tmp_path: Path) -> None:
    run = _resealed(tmp_path, "summary.json", models=[])
    with pytest.raises(UserError, match="belongs to no model") as caught:
        export(run, "every-eval-ever", tmp_path / "out")
    assert caught.value.exit_code == 6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("how", "code"), [("unfinished", 6), ("changed", 6), ("absent", 2)])
def test_a_run_that_is_not_whole_is_refused(form: str, how: str, code: int, tmp_path: Path) -> None:
    run = tmp_path / "absent" if how == "absent" else spoil(KEPT, tmp_path, how)
    with pytest.raises(UserError) as caught:
        export(run, form, tmp_path / "out")
    assert caught.value.exit_code == code
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", FORMS)
def test_a_run_of_another_kind_is_refused(form: str, tmp_path: Path) -> None:
    run = RunDirectory.begin(tmp_path, "twin", "training", {"seed": 1}, {})
    run.complete()
    with pytest.raises(UserError, match="is a training run") as caught:
        export(run.path, form, tmp_path / "out")
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_a_place_in_a_sealed_run_or_in_use_is_refused(tmp_path: Path) -> None:
    run = write_reproduction(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for place in (run / "out", run / "report", tmp_path / "used", tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(UserError) as caught:
            export(run, "every-eval-ever", place)
        assert caught.value.exit_code == 2
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"
    assert check_seal(run)
    assert not (run / "report").exists()


def test_what_json_cannot_hold_is_one_sentence(tmp_path: Path) -> None:
    run = _resealed(tmp_path, "evaluations/8.3b-wikitext103.json", perplexity=float("nan"))
    with pytest.raises(UserError, match="perplexity: Input should be a finite number") as caught:
        export(run, "every-eval-ever", tmp_path / "out")
    assert caught.value.exit_code == 6
    assert {path.name for path in tmp_path.iterdir()} == {run.name}


def test_a_model_named_like_a_path_stays_inside(tmp_path: Path) -> None:
    run = _resealed(tmp_path, "summary.json", models=[{"name": "8.3b", "run": "../../../../../escaped"}])
    place = export(run, "every-eval-ever", tmp_path / "deep" / "out")
    assert len(list(place.rglob("*.json"))) == 1
    assert {path.name for path in tmp_path.iterdir()} == {run.name, "deep"}


def _resealed(folder: Path, file: str, **changes: Any) -> Path:
    """A reproduction with other values in one of its files."""
    run = write_reproduction(folder, sealed=False)
    values = read(run / file) | changes
    (run / file).write_text(json.dumps(values), encoding="utf-8")
    seal(run)
    return run


def test_the_command_prints_the_place_and_knows_its_formats(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_TORCH, "export", str(KEPT), *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    place = tmp_path / "evaluations"
    done = run("--format", "every-eval-ever", "--out", str(place))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{place} (")
    assert list(place.rglob("*.json"))
    for arguments, word in (
        (["--format", "ro-crate"], "ro-crate"),
        (["--format", "croissant"], "dataset"),
        ([], "--format"),
    ):
        done = run(*arguments)
        assert done.returncode == 2
        assert word in done.stderr
