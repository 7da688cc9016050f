"""The model card of an export, read by huggingface_hub, with the results that were given."""

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from engine.cli import main
from evaluation.cli import main as evaluate
from tests.commands import Command
from tests.evaluation.conftest import made_passes_for_published  # noqa: F401
from tests.evaluation.standins import write_run


@pytest.mark.usefixtures("made_passes_for_published")
def test_the_hub_s_library_reads_the_card(tmp_path: Path, command: Command) -> None:
    run, one, several, out = (tmp_path / name for name in ("runs", "wikitext103.json", "all.json", "out"))
    run = write_run(run)
    assert command(evaluate, "mlm-eval", "wikitext103", "--ckpt", run, "--limit", 4, "--json", one).code == 0
    assert command(evaluate, "mlm-eval", "all", "--ckpt", run, "--limit", 4, "--json", several).code == 0
    assert command(main, "mlm-train", "export", run, out, "--results", several, "--results", one).code == 0
    card = ModelCard.load(out / "README.md")
    assert card.data.model_name == "tiny"
    result = json.loads(one.read_text())
    (first,) = (each for each in card.data.eval_results if each.metric_value == result["perplexity"])
    assert (first.dataset_name, first.dataset_type) == ("wikitext103", "Salesforce/wikitext")
    assert (first.metric_type, first.metric_name) == ("perplexity", "wikitext103 perplexity, scaled, partial")
    assert result["checkpoint_digest"] in card.text
    assert "its numbers are scaled ones" in card.text
    one.write_text(json.dumps(result | {"checkpoint_digest": "0" * 64}))
    (tmp_path / "other.json").write_text("[]")
    for file, code, words in ((one, 2, "is of checkpoint 0000000000000000, not of"), (tmp_path / "other.json", 6, "")):
        refused = command(main, "mlm-train", "export", run, tmp_path / "refused", "--results", file)
        assert (refused.code, words in refused.error) == (code, True)
        assert not (tmp_path / "refused").exists()
