"""An ablation trains its arms alike but for what they change, and its records say which of them diverged."""

from pathlib import Path

import pytest

from experiments.ablations import configure, format_ablation, run_ablation
from experiments.catalogue import Arm, find_experiment, load_experiments
from experiments.verdicts import load_results
from lineage.errors import BadInput
from tests.engine.conftest import write_dataset

ABLATIONS = {name: one for name, one in load_experiments().items() if one.ablation}


@pytest.mark.parametrize("name", ABLATIONS)
def test_arms_differ_in_what_they_change_alone(name: str, tmp_path: Path) -> None:
    experiment = ABLATIONS[name]
    assert experiment.ablation is not None
    assert len(experiment.ablation.seeds) >= 2
    plain = configure(experiment, Arm(name="plain"), 1, tmp_path).model_dump(mode="json")
    for arm in experiment.ablation.arms:
        first, second = (configure(experiment, arm, seed, tmp_path) for seed in (1, 2))
        assert first.train.model_copy(update={"seed": 2}) == second.train
        described = first.model_dump(mode="json")
        for section, changed in (("model", arm.model), ("train", arm.train)):
            differing = {key for key, value in described[section].items() if plain[section][key] != value}
            assert differing <= changed.keys()


def test_a_result_tells_what_trained_from_what_diverged(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "words")
    memory = find_experiment("transformer-xl/memory")
    assert memory.ablation is not None
    small = {"iterations": 8, "global_batch_size": 4, "microbatch_size": 4, "warmup_iterations": 0}
    arms = (Arm(name="trains"), Arm(name="diverges", train={"learning_rate": 1e6, "min_learning_rate": 1e6}))
    ablation = memory.ablation.model_copy(update={"train": memory.ablation.train | small, "arms": arms, "seeds": (1,)})
    tiny = memory.model_copy(update={"ablation": ablation})
    run, records = run_ablation(tiny, dataset, tmp_path / "runs")
    assert {one.series: one.value for one in records if one.quantity == "diverged"} == {"trains": 0, "diverges": 1}
    curve = [one for one in records if (one.series, one.quantity) == ("trains", "training_loss")]
    assert [one.x for one in curve] == list(range(1, 9))
    assert {(one.kind, one.seed) for one in records} == {("scaled", 1)}
    assert list(load_results([run.path]).records) == records
    assert "trains" in format_ablation(tiny, records).splitlines()[1]
    again, _ = run_ablation(tiny, dataset, tmp_path / "runs")
    assert again.path == run.path


def test_an_experiment_without_an_ablation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="2019/figure-6 has no ablation; there are"):
        run_ablation(find_experiment("2019/figure-6"), tmp_path, tmp_path)
