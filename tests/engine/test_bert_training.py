"""BERT through the trainer: its samples, its runs, its costs and presets, and the parity of its layouts."""

from pathlib import Path

import numpy as np
import pytest
import torch

import experiments
from data_pipeline.tokens.token_file import TokenFile
from engine.checkpoint.checkpoint import load_for_inference
from engine.compare.tensors import assemble
from engine.config import ModelConfig, RunConfig, TrainConfig
from engine.costs import flops_per_iteration, parameter_count
from engine.data.batch_schedule import BatchSchedule
from engine.families.bert.batches import PairSource, PairTrainingBatches, PairValidationBatches, read_vocabulary
from engine.families.bert.model import BERT
from engine.parallel.mesh import serial_mesh
from engine.run.files import read_metrics, read_summary
from engine.run.resolved import read_run_config
from lineage.errors import BadInput
from tests.engine.conftest import write_dataset
from tests.engine.small_run import assert_same_training, small_config, train
from verify import parity_run
from verify.engines import Work
from verify.work import write_random_tokens

TINY = ModelConfig(
    family="bert", num_layers=2, hidden_size=16, num_heads=2, seq_length=16, vocab_size=60, padded_vocab_size=64
)
BERT_MODEL = {"family": "bert"}
SHORT = {"iterations": 40, "checkpoint_interval": 20, "validation_interval": 20, "decay": "linear"}


@pytest.fixture(scope="module")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(small_config(dataset, BERT_MODEL, **SHORT), tmp_path_factory.mktemp("bert")).path


def test_a_run_learns_and_says_so(trained: Path) -> None:
    lines = read_metrics(trained)
    training = [line["loss"] for line in lines if line["kind"] == "train"]
    guess = np.log(294) + np.log(2)
    assert training[0] == pytest.approx(guess, abs=0.3)
    assert np.mean(training[-5:]) < 0.75 * guess
    validation = [line for line in lines if line["kind"].endswith("validation")]
    assert validation[0]["loss"] == pytest.approx(np.log(294), abs=0.3)  # masked tokens alone
    assert read_summary(trained).validation_perplexity == pytest.approx(np.exp(validation[-1]["loss"]))


def test_a_checkpoint_is_the_model_with_the_dataset_s_vocabulary_and_special_tokens(trained: Path) -> None:
    loaded = load_for_inference(trained)
    assert isinstance(loaded.model, BERT)
    assert (loaded.config.vocab_size, loaded.config.padded_vocab_size, loaded.config.text_vocab_size) == (294, 384, 290)


def test_an_interrupted_run_goes_on_bit_for_bit(trained: Path, dataset: Path, tmp_path: Path) -> None:
    config = small_config(dataset, BERT_MODEL, **SHORT)
    run = train(config, tmp_path).path
    for path in (run / "COMPLETE", run / "summary.json"):
        path.unlink()
    newest = sorted((run / "checkpoints").iterdir())[-1]
    for path in newest.iterdir():
        if path.is_file():
            path.unlink()
    assert_same_training(train(config, tmp_path).path, trained)


def test_parity_trains_a_bert_on_random_pairs(tmp_path: Path) -> None:
    config = RunConfig(name="bert", model=TINY)
    train = config.train.model_copy(update={"global_batch_size": 4, "microbatch_size": 2, "precision": "fp64"})
    config = config.model_copy(update={"train": train})
    tokens = ((write_random_tokens(config, 2, tmp_path / "random"), 1.0),)
    whole = assemble(parity_run._serial_pieces(Work(config, 2, tokens, None)))
    names = {tensor for _, tensor in whole}
    assert {"output of embedding", "output of layers.1", "gradient of order_head.weight", "loss"} <= names
    assert len({float(whole[iteration, "mean loss"]) for iteration in range(2)}) == 2
    assert all(np.isfinite(value).all() for value in whole.values())


def test_ranks_share_the_samples_of_one_order(dataset: Path) -> None:
    source = PairSource(
        [(TokenFile(dataset / "train_text_document"), 1.0)], read_vocabulary(dataset / "tokenizer", 290), 32, 5
    )
    batches = PairTrainingBatches(source, BatchSchedule(TrainConfig(global_batch_size=8, microbatch_size=2)), 2, 10)
    whole = list(batches.microbatches(3, 0, 1))
    parts = [one for rank in range(2) for one in batches.microbatches(3, rank, 2)]
    by_place = {places: one.tokens for one in parts for places in [one.places]}
    assert sorted(by_place) == sorted(one.places for one in whole)
    for one in whole:
        np.testing.assert_array_equal(one.tokens, by_place[one.places])


def test_several_files_are_blended_and_validated_by_weight(dataset: Path, tmp_path: Path) -> None:
    other = write_dataset(tmp_path / "other", seed=3)
    vocabulary = read_vocabulary(dataset / "tokenizer", 290)
    parts = [(TokenFile(place / "train_text_document"), weight) for place, weight in ((dataset, 0.75), (other, 0.25))]
    source = PairSource(parts, vocabulary, 32, 5)
    alone = [PairSource([part], vocabulary, 32, 5) for part in parts]
    for one in alone:
        one.prepare()
    source.prepare(40)
    found = source.microbatch(range(40), tuple(range(40))).tokens
    rows = [one.microbatch(range(40), tuple(range(40))).tokens for one in alone]
    assert [sum(any((row == other).all() for other in rows[n]) for row in found) for n in (0, 1)] == [30, 10]
    validation = PairValidationBatches(source)
    sizes = [one.prepare() for one in alone]
    assert validation.num_samples == pytest.approx(min(sizes[0] / 0.75, sizes[1] / 0.25), abs=5)


@pytest.mark.parametrize(("name", "billions"), [("336m", 0.336), ("1.3b", 1.3), ("3.9b", 3.9)])
def test_presets_have_the_published_sizes(name: str, billions: float) -> None:
    config = read_run_config(Path(experiments.__file__).parent / "models" / f"bert-{name}.toml")
    assert parameter_count(config.model) / 1e9 == pytest.approx(billions, rel=0.02)


def test_costs_count_what_the_model_has() -> None:
    config = TINY
    with torch.device("meta"):
        model = BERT(config, serial_mesh("meta"))
    assert parameter_count(config) == sum(parameter.numel() for parameter in model.parameters())
    train_config = RunConfig(name="x", model=config).train.model_copy(update={"global_batch_size": 1})
    layers = 3 * 2 * 16 * (2 * 12 * 16 * 16 + 4 * 16 * 16)  # 3 passes, 2 layers, 16 tokens: weights, then attention
    head = 3 * 16 * (2 * 16 * 16 + 0.15 * 2 * 16 * 64)
    assert flops_per_iteration(config, train_config) == pytest.approx(layers + head)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"family": "gpt2", "bert": {"layer_norm_order": "original"}}, "bert is not for family = 'gpt2'"),
        ({"family": "bert", "bert": {"layer_norm_order": "sideways"}}, "layer_norm_order"),
        ({"family": "bert", "seq_length": 4}, "has no room for"),
        ({"family": "bert", "bert": {"layer_norm_epsilon": 0}}, "layer_norm_epsilon = 0"),
    ],
)
def test_a_wrong_model_is_refused(values: dict[str, object], sentence: str, dataset: Path) -> None:
    with pytest.raises(BadInput, match=sentence):
        small_config(dataset, values)
