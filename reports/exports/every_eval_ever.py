"""The evaluations of a reproduction in the schema of Every Eval Ever 0.3.0.

https://github.com/evaleval/every_eval_ever
"""

import shlex
import time
from pathlib import Path
from typing import Any
from uuid import UUID

from engine.run.files import SUMMARY
from evaluation.schema import ClozeResult, Result
from experiments.files import EVALUATIONS
from experiments.reproduce.files import ReproducedModel, ReproductionSummary
from lineage.atomic import new_directory, write_json
from lineage.digest import sha256_json
from lineage.errors import BadInput, IntegrityFailure
from lineage.files import Manifest, read_document
from reports.files import file_name

SOFTWARE = "mlm-repro"
Json = dict[str, Any]
METRICS: dict[str, dict[str, Any]] = {
    "accuracy": {"lower_is_better": False, "min_score": 0, "max_score": 1, "metric_unit": "proportion"},
    **{
        name: {"lower_is_better": True, "min_score": 1, "max_score": "Infinity"}
        for name in ("perplexity", "subword_perplexity", "original_token_perplexity", "lm_eval_word_perplexity")
    },
    "bits_per_byte": {"lower_is_better": True, "min_score": 0, "max_score": "Infinity"},
}
"""Scores of an evaluation, with the schema's description of each metric."""
DETAILS = {
    "kind", "partial", "checkpoint_digest", "tokenizer_digest", "dtype", "num_scored_tokens", "num_examples",
}  # fmt: skip


def write_evaluations(run: Path, manifest: Manifest, digest: str, out: Path) -> None:
    """Write a folder with a file for each evaluated model, in the layout of the collection.

    Raises BadInput for a run that has no evaluations.
    """
    paths = sorted((run / EVALUATIONS).glob("*.json"))
    if manifest.kind != "reproduction" or not paths:
        raise BadInput(f"{run} is a {manifest.kind} run without evaluations: name a reproduction")
    models = read_document(run / SUMMARY, ReproductionSummary).models
    results: dict[str, list[Result]] = {model.name: [] for model in models}
    for path in paths:
        owner = max((name for name in results if path.name.startswith(f"{name}-")), key=len, default=None)
        if owner is None:
            raise IntegrityFailure(f"{path} belongs to no model of {SUMMARY}")
        results[owner].append(read_document(path, Result))
    collection = file_name(manifest.name)
    with new_directory(out, claims=True) as folder:
        for model in models:
            if results[model.name]:
                identity = f"{SOFTWARE}/{file_name(model.run or model.name)}"
                unique = UUID(hex=sha256_json([digest, identity])[:32], version=4)
                log = _log(run, manifest, digest, identity, model, results[model.name])
                write_json(folder / "data" / collection / identity / f"{unique}.json", log)


def _log(
    run: Path, manifest: Manifest, digest: str, identity: str, model: ReproducedModel, results: list[Result]
) -> Json:
    """Results of one model. The schema asks for the name of an organization, which no run knows: it is empty."""
    now = str(int(time.time()))
    software = {"name": SOFTWARE, "version": manifest.environment.version}
    trained = {name: str(value) for name, value in model.trained.to_json().items()}
    return {
        "schema_version": "0.3.0",
        "evaluation_id": f"{manifest.name}/{identity}/{now}",
        "retrieved_timestamp": now,
        "source_metadata": {
            "source_name": run.name,
            "source_type": "evaluation_run",
            "source_organization_name": "",
            "evaluator_relationship": "first_party",
            "additional_details": {"run_digest": digest},
        },
        "eval_library": software,
        "model_info": {
            "name": model.run or model.name,
            "id": identity,
            "inference_engine": software,
            "additional_details": {"deployment_type": "self_deployed", "model_availability": "unknown", **trained},
        },
        "evaluation_results": [
            _result(each, metric, score)
            for each in results
            for metric in METRICS
            if (score := getattr(each, metric, None)) is not None
        ],
    }


def _result(result: Result, metric: str, score: float) -> Json:
    of_accuracy = result.standard_error if isinstance(result, ClozeResult) else None
    error = {"accuracy": of_accuracy, "perplexity": result.spread}.get(metric)
    return {
        "evaluation_result_id": f"{result.task}/{metric}",
        "evaluation_name": result.task,
        "source_data": {
            "dataset_name": result.task,
            "source_type": "other",
            "additional_details": {"sha256": result.data_digest},
        },
        "metric_config": {
            "evaluation_description": result.protocol,
            "metric_id": metric if metric in ("accuracy", "perplexity") else f"{SOFTWARE}.{metric}",
            "score_type": "continuous",
            **METRICS[metric],
        },
        "score_details": {
            "score": score,
            "uncertainty": {} if error is None else {"standard_error": {"value": error}},
            "details": {
                name: str(value)
                for name, value in result.model_dump(include=DETAILS).items()
                if value not in (None, "")
            },
        },
        "generation_config": {"generation_args": {"execution_command": shlex.join(result.environment.argv)}},
    }
