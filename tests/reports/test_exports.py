"""Runs in the formats that others read, as those who define the formats read them."""

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import mlcroissant
import pytest
from jsonschema import Draft7Validator
from rocrate.rocrate import ROCrate

from lineage.chain import broken_links
from lineage.digest import check_seal, read_digest, seal, sha256_file
from lineage.errors import UserError
from lineage.run import RunDirectory
from reports.exports.export import FORMS, export
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


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """A run with a sealed checkpoint in it, one of whose files is too large to be copied, and one with an odd name."""
    run = RunDirectory.begin(tmp_path, "twin", "training", {"seed": 1}, {"dataset": "ab" * 32, "test set": "missing"})
    checkpoint = run.path / "checkpoints" / "iter_0000001"
    checkpoint.mkdir(parents=True)
    with (checkpoint / "model.safetensors").open("wb") as file:
        file.truncate(10_000_001)
    (checkpoint / "100 %.json").write_text("{}", encoding="utf-8")
    seal(checkpoint)
    run.complete()
    return run.path


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def files_of(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}


def described_files(folder: Path) -> dict[str, Any]:
    """The file entities of a crate by name in the run; each that has a path in the crate is there."""
    found = [entity for entity in ROCrate(folder).get_entities() if entity.type == "File"]
    places = {unquote(entity.id) for entity in found if not entity.id.startswith("ni:")}
    assert places == files_of(folder) - {"ro-crate-metadata.json"}
    return {entity["name"]: entity for entity in found}


def test_a_crate_says_what_was_run_by_what_and_what_came_of_it(tmp_path: Path) -> None:
    place = export(KEPT, "ro-crate", tmp_path / "crate")
    manifest, crate = read(KEPT / "manifest.json"), ROCrate(place)
    root, action = crate.root_dataset, crate.dereference("#run")
    assert root["conformsTo"].id == "https://w3id.org/ro/wfrun/process/0.5"
    assert root["mentions"] == action
    assert action.type == "CreateAction"
    environment = manifest["environment"]
    assert action["description"].startswith(f"{' '.join(environment['argv'])} on {environment['cpu']}, ")
    assert action["startTime"] == manifest["created"]
    assert environment["source"]["commit"] in action["instrument"]["softwareVersion"]
    inputs = {entity["name"]: entity["identifier"].removeprefix("sha256:") for entity in action["object"]}
    assert inputs == manifest["parents"]
    assert action["result"]["identifier"] == f"sha256:{read_digest(KEPT)}"
    assert action["result"] in root["hasPart"]
    assert not {"author", "publisher"} & {*root.properties()}
    assert not {"agent", "endTime"} & {*action.properties()}


def test_a_crate_holds_the_run_still_sealed(tmp_path: Path) -> None:
    place = export(KEPT, "ro-crate", tmp_path / "crate")
    copy = place / KEPT.name
    assert check_seal(copy) == check_seal(KEPT)
    assert broken_links(copy) == []
    files = described_files(place)
    assert files.keys() == files_of(KEPT)
    for name, entity in files.items():
        assert entity["sha256"] == sha256_file(copy / name)
        assert int(entity["contentSize"]) == (copy / name).stat().st_size


def test_a_crate_names_large_files_and_those_of_checkpoints(training: Path) -> None:
    place = export(training, "ro-crate", None)
    assert place == training.parent / f"{training.name}-ro-crate"
    files = described_files(place)
    large = "checkpoints/iter_0000001/model.safetensors"
    assert files.keys() == files_of(training)
    assert files_of(place / training.name) == files_of(training) - {large}
    digest = files[large].id.removeprefix("ni:///sha-256;").split("?")[0]
    assert base64.urlsafe_b64decode(digest + "=").hex() == files[large]["sha256"] == sha256_file(training / large)
    odd = files["checkpoints/iter_0000001/100 %.json"]
    assert odd.id == f"{training.name}/checkpoints/iter_0000001/100%20%25.json"
    assert [entity["name"] for entity in ROCrate(place).dereference("#run")["object"]] == ["dataset"]


def test_the_crate_of_an_experiment_is_read(tmp_path: Path) -> None:
    run = next((ROOT / "results" / "ablations").glob("experiment-*"))
    place = export(run, "ro-crate", tmp_path / "crate")
    assert described_files(place).keys() == files_of(run)


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
    with pytest.raises(UserError, match="is of no model") as caught:
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


def test_a_checkpoint_changed_inside_a_run_is_found(training: Path, tmp_path: Path) -> None:
    (training / "checkpoints" / "iter_0000001" / "100 %.json").write_text("{ }", encoding="utf-8")
    with pytest.raises(UserError, match=r"100 %.json was changed") as caught:
        export(training, "ro-crate", tmp_path / "out")
    assert caught.value.exit_code == 6


@pytest.mark.parametrize("form", ["croissant", "every-eval-ever"])
def test_a_run_of_another_kind_is_refused(form: str, training: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a training run") as caught:
        export(training, form, tmp_path / "out")
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["ro-crate", "every-eval-ever"])
def test_a_place_in_a_sealed_run_or_in_use_is_refused(form: str, tmp_path: Path) -> None:
    run = write_reproduction(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for place in (run / "out", run / "report", tmp_path / "used", tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(UserError) as caught:
            export(run, form, place)
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

    place = tmp_path / "crate"
    done = run("--format", "ro-crate", "--out", str(place))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{place} (")
    assert (place / "ro-crate-metadata.json").is_file()
    for arguments, word in ((["--format", "zip"], "zip"), (["--format", "croissant"], "dataset"), ([], "--format")):
        done = run(*arguments)
        assert done.returncode == 2
        assert word in done.stderr
