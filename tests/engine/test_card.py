"""The model card of an export, read by huggingface_hub: the run's data and recipe, and the results that were given."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from engine.cli import main
from evaluation.cli import main as evaluate
from lineage.digest import sha256_file
from tests.commands import Command
from tests.evaluation.conftest import made_passes_for_published  # noqa: F401
from tests.evaluation.standins import write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs")


@pytest.mark.usefixtures("made_passes_for_published")
def test_the_hub_s_library_reads_the_card(run: Path, tmp_path: Path, command: Command) -> None:
    one, several, out = tmp_path / "wikitext103.json", tmp_path / "all.json", tmp_path / "out"
    assert command(evaluate, "mlm-eval", "wikitext103", "--ckpt", run, "--limit", 4, "--json", one).code == 0
    assert command(evaluate, "mlm-eval", "all", "--ckpt", run, "--limit", 4, "--json", several).code == 0
    assert command(main, "mlm-train", "export", run, out, "--results", several, "--results", one).code == 0
    card = ModelCard.load(out / "README.md")
    assert card.data.model_name == "tiny"
    result = json.loads(one.read_text())
    (first,) = (each for each in card.data.eval_results if each.metric_value == result["perplexity"])
    assert (first.dataset_name, first.dataset_type) == ("wikitext103", "Salesforce/wikitext")
    assert first.metric_type == "perplexity"
    assert "scaled, partial" in card.text
    assert result["checkpoint_digest"] in card.text
    assert "| words | 1 | 40 | 4,321 | made |" in card.text
    assert 'name = "tiny"' in card.text
    one.write_text(json.dumps(result | {"checkpoint_digest": "0" * 64}))
    refused = command(main, "mlm-train", "export", run, tmp_path / "refused", "--results", one)
    assert refused.code == 2
    assert "is of checkpoint 0000000000000000, not of" in refused.error


def test_a_card_says_what_is_at_hand(run: Path, tmp_path: Path, command: Command) -> None:
    shutil.rmtree(tmp_path / "runs" / "words")
    assert command(main, "mlm-train", "export", run, tmp_path / "without").code == 0
    text = (tmp_path / "without" / "README.md").read_text()
    assert ("## Data" in text, "## Evaluation" in text, "## Recipe" in text) == (False, False, True)
    assert command(main, "mlm-train", "import", tmp_path / "without", tmp_path / "back").code == 0
    assert command(main, "mlm-train", "export", tmp_path / "back", tmp_path / "again").code == 0
    again = (tmp_path / "again" / "README.md").read_text()
    assert "## Recipe" not in again
    assert sha256_file(tmp_path / "without" / "model.safetensors") in again


def test_what_is_no_result_is_refused(run: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "other.json").write_text("[]")
    refused = command(main, "mlm-train", "export", run, tmp_path / "out", "--results", tmp_path / "other.json")
    assert refused.code == 6
    assert not (tmp_path / "out").exists()
