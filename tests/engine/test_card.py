"""The model card of an export, read by huggingface_hub."""

from pathlib import Path

from huggingface_hub import ModelCard

from engine.formats.convert import export_checkpoint
from lineage.digest import check_seal
from tests.evaluation.standins import write_run


def test_the_hub_s_library_reads_the_card(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs")
    card = ModelCard.load(export_checkpoint(run, tmp_path / "out") / "README.md")
    assert card.data.model_name == "tiny"
    assert check_seal(next((run / "checkpoints").glob("iter_*"))) in card.text
    assert "its numbers are scaled ones" in card.text
