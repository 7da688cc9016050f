"""`mlm-data trace` shows the text of the very tokens that the engine trained on in an iteration."""

from pathlib import Path
from typing import Any

import pytest

from mlm_repro.data_pipeline import cli
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.data_pipeline.tokens.trace import trace_iteration
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.data.dataset import DatasetFacts
from mlm_repro.engine.family import family_of
from mlm_repro.lineage.errors import BadInput, DataMissing
from tests.commands import Command
from tests.engine.small_run import small_config, train


def seen(config: RunConfig, iteration: int) -> list[str]:
    """The text of every sequence of an iteration, from 1, as the engine's batches have it."""
    assert config.data.dataset
    facts = DatasetFacts.read(config.data.dataset)
    order = family_of(config.model).training_order(
        config, facts.token_files("train"), config.train.iterations, None
    )
    tokenizer = Tokenizer.load(facts.tokenizer)
    return [
        tokenizer.decode(row)
        for batch in order.microbatches(iteration - 1, 0, 1)
        for row in batch.tokens
    ]


def shown(lines: list[str]) -> list[str]:
    """The text of every sequence, its documents joined."""
    texts: list[str] = []
    for line in lines:
        if line.startswith("=== "):
            texts.append("")
        elif not line.startswith("--- document"):
            texts[-1] += line
    return texts


@pytest.mark.parametrize(
    "changes",
    [{}, {"rampup_batch_size": [4, 4, 24], "iterations": 12, "warmup_iterations": 2}],
    ids=["", "growing"],
)
def test_the_text_is_what_was_trained_on(
    changes: dict[str, Any], dataset: Path, tmp_path: Path, command: Command
) -> None:
    config = small_config(dataset, **{"iterations": 8, **changes})
    run = train(config, tmp_path).path
    for iteration in (1, 3, config.train.iterations):
        done = command(cli.main, "mlm-data", "trace", run, "--step", iteration)
        assert done.code == 0
        heads = [line for line in done.out.splitlines() if line.startswith("=== ")]
        assert [
            f"sequence {place}, data-parallel rank 0" in head for place, head in enumerate(heads)
        ] == [True] * len(heads)
        assert shown(list(trace_iteration(run, iteration))) == seen(config, iteration)
    with pytest.raises(BadInput, match="has no iteration 99"):
        list(trace_iteration(run, 99))


def test_of_blended_datasets_each_sample_names_its_own(dataset: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.symlink_to(dataset)
    config = small_config(dataset, iterations=6, warmup_iterations=1)
    blended = config.model_copy(
        update={"data": config.data.model_copy(update={"dataset": ((dataset, 3.0), (other, 1.0))})}
    )
    run = train(blended, tmp_path).path
    lines = list(trace_iteration(run, 4))
    assert shown(lines) == seen(blended, 4)
    assert {line.rpartition(", of ")[2] for line in lines if line.startswith("=== ")} == {
        str(dataset),
        str(other),
    }


def test_another_dataset_in_its_place_is_not_shown(dataset: Path, tmp_path: Path) -> None:
    place = tmp_path / "data"
    place.symlink_to(dataset)
    run = train(
        small_config(place, iterations=6, warmup_iterations=1), tmp_path / "runs" / "mine"
    ).path
    place.unlink()
    with pytest.raises(
        DataMissing, match=r"that small-.* was trained on is not at .*data, or has changed"
    ):
        list(trace_iteration(run, 1))
