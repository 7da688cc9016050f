"""A small reproduction directory, written as the other rooms would write it."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mlm_repro.experiments.published import published_records
from mlm_repro.lineage.atomic import write_json, write_text
from mlm_repro.lineage.digest import seal
from mlm_repro.lineage.records import Record, write_records
from mlm_repro.reports.page import build_report, render_page
from mlm_repro.reports.render import Drawing
from mlm_repro.reports.report import Inputs, Report, assemble

WITHOUT_TORCH = """
import sys

class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("a report asks for torch")

sys.meta_path.insert(0, Refusal())
from mlm_repro.reports.cli import main
main()
"""
"""`mlm-report` where torch cannot be imported."""
HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)> & \u202eevil\x00\ud800"

SHAPE = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "seq_length",
    "vocab_size",
    "parameters",
    "global_batch_size",
    "iterations",
    "learning_rate",
)
SIZES = {
    "355m": (24, 1024, 16, 354_871_296, 4, 48, 4),
    "2.5b": (54, 1920, 20, 2_490_000_000, 9, 96, 4),
    "8.3b": (72, 3072, 24, 8_300_000_000, 12, 144, 4),
}
FINAL = {"355m": 302.4, "2.5b": 251.8, "8.3b": 214.6}
ITERATIONS = 500


def run_name(series: str) -> str:
    return f"gpt2-{series}-scaled-1a2b3c4d"


def records() -> list[Record]:
    """Published and scaled numbers of every exhibit, with a partial test and a held-out
    stand-in."""
    found = list(published_records(tuple(FINAL)))
    for series, final in FINAL.items():
        for x in range(50, ITERATIONS + 1, 50):
            value = round(final * (8192 / final) ** (math.exp(-x / 80)), 3)
            found.append(_ours("2019/figure-6", series, "validation_perplexity", value, x=x))
        for x in range(10, ITERATIONS + 1, 10):
            loss = math.log(final) + 3.5 * math.exp(-x / 80) + 0.05 * math.sin(x * 1.7)
            found.append(_ours("2019/training-loss", series, "training_loss", round(loss, 4), x=x))
    for series, final in FINAL.items():
        note = "partial: first 64 of 8,448 windows"
        found.append(_ours("2019/table-3", series, "wikitext103_perplexity", final * 3, note=note))
        found.append(_ours("2019/table-3", series, "lambada_accuracy", 1.25, unit="%"))
        found.append(_ours("2019/table-3", series, "heldout_perplexity", final * 1.02))
        found.append(_ours("2019/validation", series, "final_validation_perplexity", final))
    return found


def _ours(experiment: str, series: str, quantity: str, value: float, **more: Any) -> Record:
    names = {
        "experiment": experiment,
        "series": series,
        "quantity": quantity,
        "source": run_name(series),
    }
    digest, x_name = f"{series.replace('.', ''):0<64}", "iteration" if "x" in more else ""
    return Record(
        value=value, kind="scaled", x_name=x_name, digest=digest, seed=1234, **names, **more
    )


def summary() -> dict[str, Any]:
    models = []
    for name, (
        layers,
        hidden,
        heads,
        parameters,
        small_layers,
        small_hidden,
        small_heads,
    ) in SIZES.items():
        published = (layers, hidden, heads, 1024, 50257, parameters, 512, 300_000, 1.5e-4)
        small = small_layers * 12 * small_hidden**2 + 8192 * small_hidden
        trained = (small_layers, small_hidden, small_heads, 128, 8192, small, 8, ITERATIONS, 1.5e-4)
        models.append(
            {
                "name": name,
                "run": run_name(name),
                "published": dict(zip(SHAPE, published, strict=True)),
                "trained": dict(zip(SHAPE, trained, strict=True)),
                "seed": 1234,
                "tokens": 8 * 128 * ITERATIONS,
                "train_seconds": 412.7,
                "tokens_per_second": 1240.6,
                "checkpoint_digest": f"{name.replace('.', ''):0<64}",
            }
        )
    return {
        "target": "8.3b",
        "mode": "scaled",
        "reason": (
            "512 V100 GPUs are needed for the published configuration; this machine has 2 CPU"
            " cores."
        ),
        "source": (
            "Built-in sample of 4,000 short public-domain texts; this is NOT the 174 GB corpus of"
            " the paper."
        ),
        "twin_rule": (
            "A twin keeps the published depth and width ratios and divides every dimension by one"
            " factor."
        ),
        "models": models,
        "hardware": "2 cores, no GPU",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "commands": {
            "figure-6": "make reproduce TARGET=8.3b",
            "table-3": "make evaluate TARGET=8.3b",
        },
    }


def ledger() -> dict[str, Any]:
    """Eight stages; the sample of the length stage is hostile text."""
    dropped = {
        "clean": {"not_text": 41},
        "language": {"not_english": 212},
        "length": {"too_short": 633},
        "deduplicate": {"near_duplicate": 288, "exact_duplicate": 37},
        "decontaminate": {"test_set_overlap": 6},
    }
    documents, stages = 4000, []
    for name in [
        "source",
        "clean",
        "language",
        "length",
        "deduplicate",
        "decontaminate",
        "split",
        "tokenize",
    ]:
        reasons = dropped.get(name, {})
        after = documents - sum(reasons.values())
        sample = [
            {
                "id": "doc-7",
                "excerpt": HOSTILE if name == "length" else "An ordinary text.\nTwo lines.",
            }
        ]
        stages.append(
            {
                "name": name,
                "documents_in": documents,
                "documents_out": after,
                "bytes_in": documents * 2100,
                "bytes_out": after * 2100,
                "tokens_in": documents * 510,
                "tokens_out": after * 510,
                "dropped": {
                    reason: {"documents": count, "bytes": count * 2100, "tokens": count * 510}
                    for reason, count in reasons.items()
                },
                "changed": 17 if name == "clean" else 0,
                "samples": dict.fromkeys(reasons, sample),
                "seconds": 1.5,
                "note": "",
            }
        )
        documents = after
    split = {
        "documents": documents - 93,
        "tokens": (documents - 93) * 510,
        "bytes": (documents - 93) * 2100,
    }
    return {
        "source": "Built-in sample.",
        "stages": stages,
        "splits": {"train": split},
        "malformed_lines": 3,
        "blank_lines": 2,
        "shards": [{"read": [["sample", 0, 1000]], "documents": 4000, "digest": "cd" * 32}],
        "near_duplicates": near_duplicates(),
    }


def write_reproduction(
    root: Path, name: str = "reproduce-8.3b-5e6f7a8b", sealed: bool = True
) -> Path:
    """A complete reproduction directory under `root`."""
    path = root / name
    path.mkdir(parents=True)
    manifest = {
        "name": "reproduce-8.3b",
        "kind": "reproduction",
        "identity": "5e6f7a8b" * 8,
        "created": "2025-03-04T05:06:07+00:00",
        "config": {},
        "parents": {"data": "d" * 64},
        "environment": {
            "source": {"commit": "0" * 40, "dirty": True},
            "packages": {"numpy": "2.0.0"},
        },
    }
    write_json(path / "manifest.json", manifest)
    write_json(path / "summary.json", summary())
    write_text(path / "ledger.json", json.dumps(ledger()))
    write_text(path / "dataset.json", json.dumps(data_card()))
    write_records(path / "records.jsonl", records())
    cloze = evaluation(
        "lambada", accuracy=0.0125, standard_error=0.0015, num_correct=5, num_examples=400
    )
    kept = {"8.3b-lambada": cloze, "8.3b-wikitext103": evaluation()}
    lines = (json.dumps({"name": name, "result": result}) + "\n" for name, result in kept.items())
    write_text(path / "evaluations.jsonl", "".join(lines))
    if sealed:
        seal(path)
    return path


def near_duplicates() -> dict[str, Any]:
    """A banding of 25 by 5 with its S-curve, and pairs in 20 bins."""
    curve = [[step / 20, 1 - (1 - (step / 20) ** 5) ** 25] for step in range(21)]
    return {
        "rule": "verified",
        "bands": 25,
        "rows": 5,
        "permutations": 125,
        "shingle_characters": 5,
        "threshold": 0.7,
        "min_agreement": 61,
        "s_curve": curve,
        "expected_recall": {str(x): 1 - (1 - x**5) ** 25 for x in (0.7, 0.75, 0.8, 0.9)},
        "compared_pairs": 40,
        "compared_pairs_by_similarity": [0] * 10 + [4] * 10,
    }


def data_card() -> dict[str, Any]:
    """dataset.json; the name of a setting's test set is hostile text."""
    return {
        "name": "data-twin",
        "source": "Built-in sample.",
        "seed": 1234,
        "tokenizer": {"kind": "train", "digest": "f0" * 32},
        "vocab_size": 8000,
        "padded_vocab_size": 8192,
        "files": {"train_text_document.bin": {"bytes": 2_000_000, "sha256": "ab" * 32}},
        "settings": {
            "length": {"min_tokens": 128},
            "decontaminate": {"test_sets": ["wikitext103", HOSTILE]},
        },
        "language": {"langdetect": "1.0.9", "seed": 0, "python": "3.11.7"},
    }


def evaluation(task: str = "wikitext103", **changes: Any) -> dict[str, Any]:
    """A result of a running text, or with an accuracy one of last words; an article's title is
    hostile text."""
    values = {
        "kind": "scaled",
        "checkpoint": "8.3b/iter_5",
        "checkpoint_digest": "c" * 64,
        "tokenizer_digest": "d" * 64,
        "dtype": "float32",
        "seconds": 1.0,
        "environment": {},
        "task": task,
        "protocol": "WikiText-103 test file; window 128, stride 4",
        "partial": True,
        "note": "",
        "warnings": [],
        "data_digest": "e" * 64,
        "perplexity": 643.8,
        "num_original_tokens": 50,
        "num_tokens": 101,
        "num_scored_tokens": 100,
    }
    block = {
        "title": HOSTILE,
        "num_targets": 100,
        "num_original_tokens": 50.0,
        "num_scored": 100,
        "nll": 612.5,
    }
    of_kind: dict[str, Any] = {
        "normaliser": 50.0,
        "log_perplexity_standard_error": 0.1,
        "loss_per_token": 6.125,
        "subword_perplexity": 88.25,
        "original_token_perplexity": 643.8,
        "lm_eval_word_perplexity": 721.5,
        "num_lm_eval_words": 48,
        "bits_per_byte": 1.52,
        "token_ratio": 2.0,
        "num_windows": 1,
        "megatron": {},
        "blocks": [block],
    }
    if "accuracy" in changes:
        of_kind = {
            "standard_error": 0.0,
            "perplexity_standard_error": 64.38,
            "num_examples": 400,
            "num_correct": 5,
            "num_truncated": 0,
        }
    return values | of_kind | changes


def build_page(directory: Path, runs: Sequence[Path] = ()) -> Path:
    """The page of a reproduction, with runs of experiments."""
    return build_report(make_report(directory, runs))


def make_report(directory: Path, runs: Sequence[Path] = ()) -> Report:
    """What `build_page` makes the page of."""
    return assemble(Inputs(directory, runs))


def page_text(directory: Path, runs: Sequence[Path] = ()) -> str:
    """The page's text with an empty drawing in place of each figure, which is many times as
    fast."""
    report = make_report(directory, runs)
    empty = Drawing(Markup("<svg></svg>"), b"")
    return render_page(report, {exhibit.name: empty for exhibit in report.all_exhibits})
