"""A resealed edit of kept records, claims, tolerances and figures is named, and what is honest passes."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.experiments import catalogue, mutation
from mlm_repro.experiments.catalogue import Claim, every_claim
from mlm_repro.experiments.files import VERDICTS, Mutations, read_runs, write_runs
from mlm_repro.lineage.atomic import json_bytes
from mlm_repro.lineage.digest import seal, sha256_json
from mlm_repro.lineage.files import read_document, write_document
from mlm_repro.lineage.records import RECORDS, Record, read_records, records_bytes, write_records
from mlm_repro.lineage.run import MANIFEST
from mlm_repro.verify import recomputed
from mlm_repro.verify.kept import KeptCheck
from tests.commands import ROOT

MEASURED = {"zero/communication", "zero/memory", "2021/communication", "2021/figure-6", "2021/schedules",
            "gpipe/bubble", "gpipe/memory", "2022/activations", "huggingface/tensor-parallel",
            "2019/words"}  # fmt: skip
"""Experiments whose numbers take processes or files; here they are made again from what is kept."""
STUDY = ROOT / "results" / "ablations" / "experiments"
RUNS = {name.split("-measured-")[0].removeprefix("experiment-"): name
        for name in read_runs(STUDY) if "-measured-" in name}  # fmt: skip


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kept results; what takes long to make again is read from the repository."""
    for name in ("ablations", "ladder", "figures"):
        shutil.copytree(ROOT / "results" / name, tmp_path / name)
    measure = recomputed.measure

    def again(experiment: Any) -> Any:
        if experiment.name not in MEASURED:
            return measure(experiment)
        name, lines = RUNS[experiment.name.replace("/", "-")], (STUDY / RECORDS).read_text(encoding="utf-8")
        return [line for line in map(json.loads, lines.splitlines()) if line["source"] == name]

    monkeypatch.setattr(recomputed, "measure", lambda experiment: [
        {key: value for key, value in line.items() if key not in ("experiment", "source")}
        for line in again(experiment)
    ])  # fmt: skip
    return tmp_path


def forge(study: Path, name: str, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit a record of a kept run, and write anew every digest that is of it, up to the study's seal."""
    records, runs = read_records(study / RECORDS), read_runs(study)
    run, lines = runs[name], [record.model_dump() for record in records if record.source == name]
    edit(lines[0])
    assert run.manifest
    assert run.seal
    config = run.manifest["config"]
    bare = [{key: value for key, value in line.items() if key not in ("source", "digest")} for line in lines]
    if "records" in config:
        config["records"] = sha256_json(bare)
        run.manifest["config_digest"] = sha256_json(config)
    own = [Record(**line | {"digest": run.manifest["config_digest"]}) for line in lines]
    contents = {MANIFEST: json_bytes(run.manifest), RECORDS: records_bytes(own)}
    for file, content in contents.items():
        run.seal["files"][file] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    run.seal["digest"] = sha256_json(run.seal["files"])
    write_runs(study, runs.values())
    first = next(place for place, record in enumerate(records) if record.source == name)
    write_records(study / RECORDS, [*records[:first], *own, *records[first + len(own) :]])
    seal(study)


def test_what_is_kept_is_made_again(results: Path) -> None:
    check = KeptCheck(results)
    assert check.broken == []
    assert check.counted["records"] > 200
    assert check.counted["claims"] == len(every_claim())
    assert (check.counted["verdicts"] > 100, check.counted["figures"]) == (True, 1)
    assert any("need" in sentence for sentence in check.left)


EDITED = {
    "2019/table-3/8.3b/wikitext103": {"value": "9.81"}, "2021/table-1/1.7b/tflops": {"value": "150"},
    "2019/text/tokens": {"value": "270328"}, "2022/text/gpt-3-flops": {"says": "at most", "sentence": "at most 2.7%"},
    "2021/text/recompute-loss": {"says": "at most", "sentence": "at most 33% lower throughput"},
    "2021/sizes/145b": {"sentence": "about 145 billion parameters", "says": "about"},
}  # fmt: skip
"""Claims with a forged number, class or sentence."""
LOOSER = catalogue.Tolerance(claims=("2021/text/checkpoint-size",), tolerance="5%", because="a forgery")


def test_every_resealed_forgery_is_named(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of every measured run, claims, a figure and a verdict, all at once."""
    for name in RUNS.values():
        forge(results / "ablations" / "experiments", name, lambda line: line.update(value=line["value"] * 1.01 + 0.001))
    edited = tuple(Claim.model_validate(one.model_dump() | EDITED.get(one.id, {})) for one in every_claim())
    monkeypatch.setattr(catalogue, "every_claim", lambda: edited)
    monkeypatch.setattr(mutation, "every_claim", lambda: edited)
    tolerances = (LOOSER, *catalogue.every_tolerance())
    monkeypatch.setattr(catalogue, "every_tolerance", lambda: tolerances)
    for experiment in catalogue.load_experiments().values():
        monkeypatch.delitem(experiment.__dict__, "claims", raising=False)
    figure = results / "figures" / "ladder.svg"
    figure.write_text(figure.read_text(encoding="utf-8").replace("</svg>", "<text>123</text></svg>"), encoding="utf-8")
    verdicts = results / "ablations" / VERDICTS
    rows = read_document(verdicts, Mutations)
    write_document(verdicts, Mutations(
        claims=rows.claims, rows=[*rows.rows[:-1], rows.rows[-1].model_copy(update={"outcome": "undecided"})]
    ))  # fmt: skip
    forged = [*RUNS.values(), *EDITED, *LOOSER.claims, "figures/ladder.svg", rows.rows[-1].claim]
    broken = KeptCheck(results).broken
    assert len(forged) >= 20
    assert [name for name in forged if not any(name in sentence for sentence in broken)] == []
