"""BERT: transformers' BertForPreTraining in the original order, every layout like the serial run,
and its trainings."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import BertConfig as TheirConfig
from transformers import BertForPreTraining, BertModel, PreTrainedModel

from mlm_repro import experiments
from mlm_repro.engine.compare.tensors import assemble
from mlm_repro.engine.config import BertConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from mlm_repro.engine.costs import flops_per_iteration, parameter_count
from mlm_repro.engine.families.bert.model import BERT
from mlm_repro.engine.formats.convert import import_checkpoint
from mlm_repro.engine.formats.huggingface import FORMATS
from mlm_repro.engine.inference import load_for_inference, parameters_of
from mlm_repro.engine.inputs import TrainingInputs
from mlm_repro.engine.launch.mesh import build_mesh
from mlm_repro.engine.launch.threads import run_threads
from mlm_repro.engine.model.microbatch import PipelineInput, SentencePairs
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.parallel.sharding import sharded_parameters
from mlm_repro.engine.rng import Dropout
from mlm_repro.engine.run.files import read_metrics, read_summary
from mlm_repro.engine.run.resolved import read_run_config, resolve
from mlm_repro.engine.step import build_step
from mlm_repro.evaluation.checkpoints import load_checkpoint
from mlm_repro.lineage.errors import BadInput
from mlm_repro.verify.engines import Ours, Work, write_random_tokens
from mlm_repro.verify.parity import SERIAL
from mlm_repro.verify.runner import train as train_rank
from tests.engine.like_serial import Result, assert_like_serial, trained, whole
from tests.engine.small_run import assert_same_training, in_two_sessions, small_config, train

MODEL = ModelConfig(
    family="bert",
    num_layers=4,
    hidden_size=16,
    num_heads=4,
    seq_length=8,
    vocab_size=29,
    padded_vocab_size=32,
)
TRAIN = TrainConfig(
    iterations=3,
    global_batch_size=4,
    microbatch_size=1,
    learning_rate=1e-2,
    warmup_iterations=1,
    precision="fp64",
)


def random_pairs(rows: int, seed: int, dropout: Dropout | None = None) -> PipelineInput:
    """Sequences of several lengths with about a third of the tokens masked; token 0 has no gradient
    in transformers."""
    random = np.random.RandomState(seed)
    s = MODEL.seq_length
    is_token = np.arange(s) < random.randint(4, s + 1, rows)[:, None]
    targets = np.where(
        (random.random_sample((rows, s)) < 0.35) & is_token, random.randint(0, 29, (rows, s)), -1
    )
    targets[:, 1] = 5
    types = (np.arange(s) >= random.randint(2, 4, rows)[:, None]) & is_token
    return PipelineInput(
        torch.from_numpy(random.randint(1, 29, (rows, s))),
        torch.from_numpy(targets),
        dropout,
        pairs=SentencePairs(
            torch.from_numpy(types.astype(np.int64)),
            torch.from_numpy(is_token),
            torch.from_numpy(random.randint(0, 2, rows)),
        ),
    )


def train_on(layout: Layout, parallel: ParallelConfig, order: str) -> Result:
    """Three iterations in float64 on fixed data; also the loss of an evaluation."""
    mesh = build_mesh(layout, parallel.sequence_parallel)
    config = MODEL.model_copy(update={"bert": BertConfig(layer_norm_order=order)})
    model, step = build_step(config, TRAIN, parallel, mesh)

    def batch(iteration: int) -> list[PipelineInput]:
        places = range(mesh.dp.rank, TRAIN.global_batch_size, layout.dp)
        return [
            random_pairs(1, 100 * iteration + place, Dropout(0.1, TRAIN.seed, iteration, (place,)))
            for place in places
        ]

    result = trained(model, step, TRAIN, batch)
    return result | {"evaluated": mesh.pp.all_reduce(model.evaluate([random_pairs(3, 9)])).item()}


@cache
def serial(order: str) -> Result:
    return run_threads(train_on, 1, Layout(), ParallelConfig(), order)[0]


@pytest.mark.parametrize(
    ("layout", "order", "options"),
    [
        (Layout(tp=2), "rearranged", {}),
        (Layout(tp=4), "original", {"sequence_parallel": True, "recompute": "selective"}),
        (Layout(pp=2), "original", {"recompute": "full"}),
        (Layout(dp=2), "rearranged", {"shard_optimizer": True}),
        (Layout(pp=2), "rearranged", {"schedule": "interleaved", "chunks": 2}),
        (
            Layout(tp=2, pp=2, dp=2),
            "original",
            {"sequence_parallel": True, "shard_optimizer": True},
        ),
        (
            Layout(tp=2, pp=2),
            "rearranged",
            {"sequence_parallel": True, "recompute": "full", "schedule": "gpipe"},
        ),
    ],
    ids=str,
)
def test_layout_equals_serial(layout: Layout, order: str, options: dict[str, Any]) -> None:
    parallel = ParallelConfig(tp=layout.tp, pp=layout.pp, **options)
    ranks = run_threads(train_on, layout.world_size, layout, parallel, order)
    assert_like_serial(ranks, serial(order))


def test_the_orders_have_the_same_parameters_and_are_different_models() -> None:
    assert serial("original")["weights"].keys() == serial("rearranged")["weights"].keys()
    assert serial("original")["losses"][0] != serial("rearranged")["losses"][0]


def test_padding_changes_nothing() -> None:
    model = BERT(MODEL, serial_mesh()).eval()
    model.initialize(1)
    batch = random_pairs(4, 3)
    assert batch.pairs is not None
    noisy = torch.where(batch.pairs.is_token, batch.tokens, 7)
    with torch.no_grad():
        losses = [
            model.batch_loss(model.run_stage(tokens, one), one)
            for tokens in (batch.tokens, noisy)
            for one in (PipelineInput(tokens, batch.targets, None, pairs=batch.pairs),)
        ]
    torch.testing.assert_close(*losses, rtol=0, atol=0)


def write_theirs(
    directory: Path, kind: type[PreTrainedModel] = BertForPreTraining
) -> PreTrainedModel:
    """A random BERT of the other library, every value visible, with 31 rows of vocabulary and no
    dropout."""
    config = TheirConfig(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model, generator = kind(config).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "LayerNorm.weight" in name else 0.0, 0.3, generator=generator)
    model.save_pretrained(directory)
    return model


def loss_and_gradients(layout: Layout, checkpoint: Path) -> tuple[float, dict[str, Any]]:
    """The loss of a step of four sequences and whole gradients."""
    mesh = build_mesh(layout)
    model = load_for_inference(checkpoint, mesh).model.train()
    batch = random_pairs(4, 2)
    loss = model.batch_loss(model.run_stage(batch.tokens, batch), batch)
    loss.backward()
    parameters = sharded_parameters(model, mesh)
    return loss.item(), {
        p.name: whole(p, p.local.grad) for p in parameters if p.local.grad is not None
    }


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_step_is_that_of_transformers(tp: int, tmp_path: Path) -> None:
    theirs = write_theirs(tmp_path / "theirs").train()
    checkpoint = import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    batch = random_pairs(4, 2)
    assert batch.pairs is not None
    output = theirs(
        batch.tokens,
        attention_mask=batch.pairs.is_token.long(),
        token_type_ids=batch.pairs.token_types,
        labels=torch.where(batch.targets < 0, -100, batch.targets),
        next_sentence_label=batch.pairs.is_swapped,
    )
    output.loss.backward()
    config = load_for_inference(checkpoint).config
    parts = dict(theirs.named_parameters())
    short = {name.removeprefix("bert."): parameter.grad for name, parameter in parts.items()}
    for loss, gradients in run_threads(loss_and_gradients, tp, Layout(tp=tp), checkpoint):
        assert loss == pytest.approx(output.loss.item(), abs=1e-5)
        assert len(gradients) == len(list(parameters_of(config)))
        for name, gradient in gradients.items():
            found = FORMATS["bert"].split(name, torch.from_numpy(gradient), config)
            for part, value in zip(FORMATS["bert"].their_names(name, config), found, strict=True):
                torch.testing.assert_close(
                    value, short[part], rtol=0, atol=1e-5, msg=lambda text, part=part: part + text
                )


def test_a_body_alone_and_old_names_are_read(tmp_path: Path) -> None:
    """Heads that the files lack are zeros, the first published files say gamma and beta."""
    body = write_theirs(tmp_path / "body", BertModel)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor
        for name, tensor in body.state_dict().items()
    }
    old = {name.replace("LayerNorm.bias", "LayerNorm.beta"): tensor for name, tensor in old.items()}
    save_file(old, tmp_path / "body" / "model.safetensors", metadata={"format": "pt"})
    ours = load_for_inference(import_checkpoint(tmp_path / "body", tmp_path / "ours")).model
    assert ours.get_parameter("layers.0.input_layernorm.weight").equal(
        body.embeddings.LayerNorm.weight
    )
    assert not ours.get_parameter("order_head.weight").any()
    assert (tmp_path / "ours" / "huggingface" / "config.json").is_file()


def test_a_bert_is_not_read_as_a_gpt2(tmp_path: Path) -> None:
    write_theirs(tmp_path / "theirs")
    with pytest.raises(BadInput, match="is a bert"):
        load_checkpoint(import_checkpoint(tmp_path / "theirs", tmp_path / "ours"))


TINY = ModelConfig(
    family="bert",
    num_layers=2,
    hidden_size=16,
    num_heads=2,
    seq_length=16,
    vocab_size=60,
    padded_vocab_size=64,
)
BERT_MODEL = {"family": "bert"}
SHORT = {"iterations": 40, "checkpoint_interval": 20, "validation_interval": 20, "decay": "linear"}


@pytest.fixture(scope="module")
def bert_run(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(small_config(dataset, BERT_MODEL, **SHORT), tmp_path_factory.mktemp("bert")).path


def test_a_run_learns_and_says_so(bert_run: Path) -> None:
    lines = read_metrics(bert_run)
    training = [line["loss"] for line in lines if line["kind"] == "train"]
    guess = np.log(294) + np.log(2)
    assert training[0] == pytest.approx(guess, abs=0.3)
    assert np.mean(training[-5:]) < 0.75 * guess
    validation = [line for line in lines if line["kind"].endswith("validation")]
    assert validation[0]["loss"] == pytest.approx(np.log(294), abs=0.3)  # masked tokens alone
    assert read_summary(bert_run).validation_perplexity == pytest.approx(
        np.exp(validation[-1]["loss"])
    )


def test_a_checkpoint_is_the_model_with_the_dataset_s_vocabulary_and_special_tokens(
    bert_run: Path,
) -> None:
    loaded = load_for_inference(bert_run)
    assert isinstance(loaded.model, BERT)
    assert (
        loaded.config.vocab_size,
        loaded.config.padded_vocab_size,
        loaded.config.text_vocab_size,
    ) == (294, 384, 290)


def test_an_interrupted_run_goes_on_bit_for_bit(
    bert_run: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(dataset, BERT_MODEL, **SHORT)
    assert_same_training(in_two_sessions(config, tmp_path, 20, monkeypatch), bert_run)


def losses_of(config: RunConfig, layout: Layout) -> list[tuple[float, float]]:
    """Loss and gradient norm of each of five iterations on the run's own batches."""
    resolved_run = resolve(config, layout.world_size)
    mesh, data = (
        build_mesh(resolved_run.layout, config.parallel.sequence_parallel),
        resolved_run.data,
    )
    inputs = TrainingInputs(resolved_run.config, 5, data.token_files("train"), data.tokenizer, mesh)
    _, step = build_step(resolved_run.config.model, config.train, config.parallel, mesh)
    return [
        (g.loss, g.norm) for g in (step.run(inputs.of(iteration), 1e-3) for iteration in range(5))
    ]


@pytest.mark.parametrize(
    ("size", "parallel", "dp"),
    [
        (1, {}, 1),
        (2, {}, 1),
        (8, {}, 1),
        (2, {}, 4),
        (1, {"tp": 2}, 2),
        (2, {"pp": 2}, 2),
        (1, {"tp": 2, "pp": 2, "sequence_parallel": True, "shard_optimizer": True}, 2),
    ],
)
def test_a_mean_over_the_batch_depends_on_no_division(
    size: int, parallel: dict[str, Any], dp: int, dataset: Path
) -> None:
    """The loss of the whole batch in one microbatch on one rank; the papers' mean over microbatches
    differs."""

    def found(size: int, dp: int, normalise: str, **parallel: Any) -> list[tuple[float, float]]:
        settings = {
            "microbatch_size": size,
            "normalise": normalise,
            "precision": "fp64",
            "global_batch_size": 8,
        }
        config = small_config(dataset, BERT_MODEL, **settings)
        config = config.model_copy(update={"parallel": ParallelConfig(**parallel)})
        layout = Layout(tp=config.parallel.tp, pp=config.parallel.pp, dp=dp)
        return run_threads(losses_of, layout.world_size, config, layout)[0]

    whole = found(8, 1, "microbatch")
    np.testing.assert_allclose(found(size, dp, "batch", **parallel), whole, rtol=1e-11)
    by_microbatch = np.array(found(size, dp, "microbatch", **parallel))
    assert (np.abs(by_microbatch / whole - 1).max() > 1e-3) == (size * dp < 8 or dp > 1)


def test_parity_trains_a_bert_on_random_pairs(tmp_path: Path) -> None:
    config = RunConfig(name="bert", model=TINY)
    train = config.train.model_copy(
        update={"global_batch_size": 4, "microbatch_size": 2, "precision": "fp64"}
    )
    config = config.model_copy(update={"train": train})
    tokens = ((write_random_tokens(config, 2, tmp_path / "random"), 1.0),)
    whole = assemble(train_rank(Ours, Work(config, 2, tokens, None), SERIAL).parts)
    names = {tensor for _, tensor in whole}
    assert {
        "output of embedding",
        "output of layers.1",
        "gradient of order_head.weight",
        "loss",
    } <= names
    assert len({float(whole[iteration, "mean loss"]) for iteration in range(2)}) == 2
    assert all(np.isfinite(value).all() for value in whole.values())


@pytest.mark.parametrize(("name", "billions"), [("336m", 0.336), ("1.3b", 1.3), ("3.9b", 3.9)])
def test_presets_have_the_published_sizes(name: str, billions: float) -> None:
    config = read_run_config(Path(experiments.__file__).parent / "models" / f"bert-{name}.toml")
    assert parameter_count(config.model) / 1e9 == pytest.approx(billions, rel=0.02)


def test_costs_count_what_the_model_has() -> None:
    train_config = RunConfig(name="x", model=TINY).train.model_copy(update={"global_batch_size": 1})
    # 3 passes, 2 layers, 16 tokens: weights, then attention.
    layers = 3 * 2 * 16 * (2 * 12 * 16 * 16 + 4 * 16 * 16)
    head = 3 * 16 * (2 * 16 * 16 + 0.15 * 2 * 16 * 64)
    assert flops_per_iteration(TINY, train_config) == pytest.approx(layers + head)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"family": "gpt2", "bert": {"layer_norm_order": "original"}},
            "have no effect on family = 'gpt2'",
        ),
        ({"family": "bert", "bert": {"layer_norm_order": "sideways"}}, "layer_norm_order"),
        ({"family": "bert", "seq_length": 4}, "is too short for a BERT"),
        (
            {"family": "bert", "bert": {"layer_norm_epsilon": 0}},
            "layer_norm_epsilon: 0 should be greater than 0",
        ),
    ],
)
def test_a_wrong_model_is_refused(values: dict[str, object], sentence: str, dataset: Path) -> None:
    with pytest.raises(BadInput, match=sentence):
        small_config(dataset, values)
