"""An ablation trains its arms alike but for what they change, and says which of them diverged."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments import ablations
from experiments.ablations import ABLATIONS, configure, format_ablation, run_ablation
from lineage.errors import BadInput
from tests.engine.conftest import write_dataset


@pytest.mark.parametrize("name", ABLATIONS)
def test_arms_differ_in_what_they_change_alone(name: str, tmp_path: Path) -> None:
    for arm, changed in ABLATIONS[name].arms.items():
        first, second = (configure(name, arm, seed, tmp_path) for seed in (1, 2))
        assert first.train.model_copy(update={"seed": 2}) == second.train
        described = first.model_dump(mode="json")
        for section, values in changed.items():
            for key, value in values.items():
                assert value.items() <= described[section][key].items() if isinstance(value, dict) else True
                described[section].pop(key)
    assert len(ABLATIONS[name].seeds) >= 2


def test_a_result_tells_what_trained_from_what_diverged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = write_dataset(tmp_path / "words")
    memory = ABLATIONS["memory"]
    small = {"iterations": 8, "global_batch_size": 4, "microbatch_size": 4, "warmup_iterations": 0}
    arms = {"trains": {}, "diverges": {"train": {"learning_rate": 1e6, "min_learning_rate": 1e6}}}
    tiny = replace(memory, train={**memory.train, **small}, arms=arms, seeds=(1,))
    monkeypatch.setitem(ablations.ABLATIONS, "tiny", tiny)
    result = run_ablation("tiny", dataset, tmp_path / "runs", tmp_path / "tiny.json")
    assert {arm: found["diverged"] for arm, found in result["arms"].items()} == {"trains": [False], "diverges": [True]}
    assert "diverged" in format_ablation(result).splitlines()[2]
    with pytest.raises(BadInput, match="there is no ablation 'big'; there are memory, large-batch"):
        run_ablation("big", dataset, tmp_path, tmp_path / "big.json")
