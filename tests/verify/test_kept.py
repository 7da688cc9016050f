"""The kept results: a resealed edit of records, claims and tolerances is named, and what
is honest passes."""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.experiments import catalogue, remade
from mlm_repro.experiments.catalogue import (
    TAKES_LONG,
    Claim,
    Experiment,
    every_claim,
    load_experiments,
)
from mlm_repro.experiments.files import VERDICTS, read_runs, write_runs
from mlm_repro.experiments.runner import measure
from mlm_repro.experiments.sealed import Line
from mlm_repro.experiments.verdicts import judge, load_results
from mlm_repro.lineage.atomic import json_bytes
from mlm_repro.lineage.digest import seal, sha256_json
from mlm_repro.lineage.errors import DataMissing
from mlm_repro.lineage.files import Comparisons, Remade, read_document, write_document
from mlm_repro.lineage.records import RECORDS, Record, read_records, records_bytes, write_records
from mlm_repro.lineage.run import MANIFEST
from mlm_repro.verify import recomputed
from mlm_repro.verify.recomputed import RunCheck
from tests.commands import ROOT
from tests.mutation import JUDGED, Mutations

MEASURED = {
    "zero/communication",
    "zero/memory",
    "2021/communication",
    "2021/figure-6",
    "2021/schedules",
    "gpipe/bubble",
    "gpipe/memory",
    "2022/activations",
    "huggingface/tensor-parallel",
    "2019/words",
}
"""Experiments whose numbers take processes or files; here they are made again from what is kept."""
STUDY = ROOT / "results" / "ablations" / "experiments"
RUNS = {
    name.split("-measured-")[0].removeprefix("experiment-"): name
    for name in read_runs(STUDY)
    if "-measured-" in name
}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kept results, of which more is made again here: measured numbers and verdicts.

    What takes long to measure is read from the repository.
    """
    shutil.copytree(ROOT / "results" / "ablations", tmp_path / "ablations")
    monkeypatch.setattr(remade, "made_again", measured_again)
    kept = recomputed.KINDS[recomputed.FOLDER]
    monkeypatch.setitem(
        recomputed.KINDS, recomputed.FOLDER, kept._replace(made=(*kept.made, verdicts))
    )
    return tmp_path


SIMULATED = remade.made_again
MADE = Counter[str]()
"""How many records, verdicts and claims were made again."""


def measured_again(experiment: Experiment, mode: str) -> list[Record] | None:
    """Records that take no training and no hours."""
    if (
        (made := SIMULATED(experiment, mode)) is None
        and experiment.measures
        and experiment.measures not in TAKES_LONG
    ):
        lines: list[Line] = []
        if experiment.name in MEASURED:
            name, kept = (
                RUNS[experiment.name.replace("/", "-")],
                (STUDY / RECORDS).read_text(encoding="utf-8"),
            )
            lines += [line for line in map(json.loads, kept.splitlines()) if line["source"] == name]
        else:
            with suppress(DataMissing):
                lines += measure(experiment)
        made = [
            Record(**{"experiment": experiment.name, "source": ""} | line) for line in lines
        ] or None
    MADE["records"] += len(made or ())
    return made


def verdicts(folder: Path) -> Comparisons:
    """Give the verdicts again and compare them, claims and tolerances included, with those that are
    kept."""
    for path in sorted(folder.rglob(VERDICTS)):
        kept, every = (
            read_document(path, Mutations),
            judge(load_experiments().values(), load_results([path.parent])),
        )
        judged = [(each, each.claim, each.record) for each in every if each.outcome in JUDGED]
        MADE.update(verdicts=len(kept.rows), claims=len(kept.claims))
        yield Remade(
            f"{path.name}: the verdict on",
            {
                each.claim: (
                    each.outcome,
                    each.scale,
                    each.published,
                    each.tolerance,
                    _short(each.ours),
                )
                for each in kept.rows
            },
            {
                claim.id: (
                    each.outcome,
                    each.scale,
                    claim.published,
                    claim.allowed.tolerance,
                    _short(record.value if record else None),
                )
                for each, claim, record in judged
            },
        )
        yield Remade(f"{path.name}: sentence", kept.sentence, kept.score)
        yield Remade(path.name, kept.claims, {claim.id: claim.asked for claim in every_claim()})


def _short(number: float | None) -> str:
    """Six digits: processors round the last ones otherwise."""
    return "" if number is None else f"{number:.6g}"


def forge(study: Path, name: str, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit a record of a kept run, and write anew every digest that is of it, up to the study's
    seal."""
    records, runs = read_records(study / RECORDS), read_runs(study)
    run, lines = runs[name], [record.model_dump() for record in records if record.source == name]
    edit(lines[0])
    assert run.manifest
    assert run.seal
    config = run.manifest["config"]
    bare = [
        {key: value for key, value in line.items() if key not in ("source", "digest")}
        for line in lines
    ]
    if "records" in config:
        config["records"] = sha256_json(bare)
        run.manifest["config_digest"] = sha256_json(config)
    own = [Record(**line | {"digest": run.manifest["config_digest"]}) for line in lines]
    contents = {MANIFEST: json_bytes(run.manifest), RECORDS: records_bytes(own)}
    for file, content in contents.items():
        run.seal["files"][file] = {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    run.seal["digest"] = sha256_json(run.seal["files"])
    write_runs(study, runs.values())
    first = next(place for place, record in enumerate(records) if record.source == name)
    write_records(study / RECORDS, [*records[:first], *own, *records[first + len(own) :]])
    seal(study)


def test_what_is_kept_is_made_again(results: Path) -> None:
    MADE.clear()
    check = RunCheck(results)
    assert check.broken == []
    assert MADE["records"] > 200
    assert MADE["claims"] == len(every_claim())
    assert MADE["verdicts"] > 100
    assert any("its numbers, which were measured" in sentence for sentence in check.left)


EDITED = {
    "2019/table-3/8.3b/wikitext103": {"value": "9.81"},
    "2021/table-1/1.7b/tflops": {"value": "150"},
    "2019/text/tokens": {"value": "270328"},
    "2022/text/gpt-3-flops": {"says": "at most", "sentence": "at most 2.7%"},
    "2021/text/recompute-loss": {"says": "at most", "sentence": "at most 33% lower throughput"},
    "2021/sizes/145b": {"sentence": "about 145 billion parameters", "says": "about"},
}
"""Claims with a forged number, class or sentence."""
LOOSER = catalogue.Tolerance(
    claims=("2021/text/checkpoint-size",), tolerance="5%", because="a forgery"
)


def test_every_resealed_forgery_is_named(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of every measured run, claims and a verdict, all at once."""
    for name in RUNS.values():
        forge(
            results / "ablations" / "experiments",
            name,
            lambda line: line.update(value=line["value"] * 1.01 + 0.001),
        )
    edited = tuple(
        Claim.model_validate(one.model_dump() | EDITED.get(one.id, {})) for one in every_claim()
    )
    monkeypatch.setattr(catalogue, "every_claim", lambda: edited)
    monkeypatch.setitem(globals(), "every_claim", lambda: edited)
    tolerances = (LOOSER, *catalogue.every_tolerance())
    monkeypatch.setattr(catalogue, "every_tolerance", lambda: tolerances)
    for experiment in catalogue.load_experiments().values():
        monkeypatch.delitem(experiment.__dict__, "claims", raising=False)
    verdicts = results / "ablations" / VERDICTS
    rows = read_document(verdicts, Mutations)
    write_document(
        verdicts,
        Mutations(
            claims=rows.claims,
            rows=[*rows.rows[:-1], rows.rows[-1].model_copy(update={"outcome": "undecided"})],
        ),
    )
    forged = [*RUNS.values(), *EDITED, *LOOSER.claims, rows.rows[-1].claim]
    broken = RunCheck(results).broken
    assert len(forged) >= 20
    assert [name for name in forged if not any(name in sentence for sentence in broken)] == []
