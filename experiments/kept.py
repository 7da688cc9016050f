"""What studies keep, by the runs that they were made of: those on disk, or each line's own parts. Imports no torch."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlm_repro.engine.run.derived import ending_of, perplexity_of, recipe, summary_of
from mlm_repro.engine.run.files import SUMMARY, TrainingSummary
from mlm_repro.experiments.files import RUNS, KeptRun, read_runs
from mlm_repro.experiments.sealed import digest_of_numbers
from mlm_repro.experiments.verdicts import load_results, parts_of
from mlm_repro.lineage.derived import Checked, Derived, Partly
from mlm_repro.lineage.digest import is_sealed, sha256_json
from mlm_repro.lineage.files import Manifest, parse_document
from mlm_repro.lineage.records import RECORDS, records_bytes
from mlm_repro.lineage.run import MANIFEST, identity_in
from mlm_repro.lineage.verified import check_seal_once


def trainings(keep: Callable[[Path], KeptRun]) -> Derived:
    """The kept trainings of a study, as `keep` gives them, by those that lie beside it."""
    return lambda run: kept_trainings(run, {name: run.path.parent / name for name in read_runs(run.path)}, keep)


def kept_trainings(
    run: Checked, places: Mapping[str, Path], keep: Callable[[Path], KeptRun]
) -> Iterator[tuple[str, Any, Any]]:
    """The kept trainings by name, and what those give that lie at the places; of others what their own parts give."""
    said = read_runs(run.path)
    made: dict[str, object] = {}
    for name, place in places.items():
        line = said.get(name, KeptRun(name=name))
        line.check_seal()
        if is_sealed(place):
            check_seal_once(place)
            fields = {"name", "summary", "metrics"} | ({"manifest", "seal"} if line.manifest else set())
            made[name] = Partly(keep(place).model_dump(include=fields))  # the first release kept no manifest
        else:
            run.absent.extend([] if place.is_dir() else [place.name])
            made[name] = _by_its_parts(line)
    yield RUNS, said, made


def _by_its_parts(line: KeptRun) -> Partly:
    """What a kept training says by its own configuration and metrics."""
    lines = [Partly() if each["kind"] == "train" else Partly(perplexity=perplexity_of(each)) for each in line.metrics]
    if line.summary is None:
        return Partly(metrics=lines)
    said, made = parse_document(line.summary, TrainingSummary, f"{SUMMARY} of {line.name}"), ending_of(line.metrics)
    if line.manifest:
        manifest = parse_document(line.manifest, Manifest, f"{MANIFEST} of {line.name}")
        made |= summary_of(recipe(manifest), said)
    return Partly(metrics=lines, summary=made)


def numbers(run: Checked) -> Iterator[tuple[str, Any, Any]]:
    """Manifests and records of the runs of experiments that a run is, or keeps, by each other."""
    load_results([run.path])
    kept = read_runs(run.path)
    for part in parts_of(run.path):
        manifest, config, name = part.manifest, part.manifest["config"], part.name
        if name in kept:
            kept[name].check_seal({RECORDS: records_bytes(part.records)})
        begun = {"records": digest_of_numbers(part.records), "refused": sha256_json(part.refused)}
        if "records" not in config:
            run.absent.append(f"the digest of the records of {name}, which began under an earlier version")
            begun = {}
        digest = sha256_json(config)
        due = Partly(identity=identity_in(manifest), config_digest=digest, config=Partly(begun))
        yield f"{MANIFEST} of {name}", manifest, due
        origin = {"source": name, "digest": digest, "experiment": config["experiment"]["name"]}
        yield RECORDS, part.records, [record.model_copy(update=origin) for record in part.records]


def gathered(run: Checked) -> Iterator[tuple[str, Any, Any]]:
    """The manifest of a study of experiments, by the runs that it keeps."""
    identities = {name: line.manifest and line.manifest["identity"] for name, line in read_runs(run.path).items()}
    yield f"{MANIFEST}: runs", run.manifest.config["runs"], identities
