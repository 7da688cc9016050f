"""A run that starts from weights or continues another, beside transformers' GPT-2 and torch's AdamW
in float64."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from mlm_repro.data_pipeline.tokens.samples import training_samples
from mlm_repro.data_pipeline.tokens.token_file import TokenFile
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.formats.convert import export_checkpoint, import_checkpoint
from mlm_repro.engine.launch.threads import run_threads
from mlm_repro.engine.run.files import read_metrics, read_steps
from mlm_repro.engine.run.resolved import continue_run, resolve
from mlm_repro.engine.train import train as train_resolved
from mlm_repro.lineage.config import override_config
from mlm_repro.lineage.digest import read_digest
from mlm_repro.lineage.errors import BadInput
from tests.engine.conftest import write_dataset
from tests.engine.small_run import assert_same_training, mlm_train, small_config, train, write_toml

TRAIN: dict[str, Any] = {
    "iterations": 20,
    "global_batch_size": 4,
    "microbatch_size": 2,
    "precision": "fp64",
    "decay": "constant",
    "warmup_iterations": 3,
    "validation_interval": 20,
    "checkpoint_interval": 20,
}
LAYOUTS = {
    "serial": (1, []),
    "tp 2": (2, ["parallel.tp=2"]),
    "pp 2": (2, ["parallel.pp=2"]),
    "dp 2": (2, []),
}


def train_at(config: RunConfig, root: Path, layout: str) -> Path:
    """Directory of the run, on threads."""
    ranks, overrides = LAYOUTS[layout]
    run = resolve(override_config(config, overrides), ranks)
    return run_threads(lambda: train_resolved(run, root).path, ranks, timeout_seconds=300)[0]


def loop(model: GPT2LMHeadModel, dataset: Path, rates: list[float]) -> Iterator[float]:
    """The losses of an ordinary loop over the samples of the dataset."""
    model = model.double().train()
    groups: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[not (name.endswith("bias") or ".ln_" in name)].append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": 0.01},
            {"params": groups[False], "weight_decay": 0.0},
        ]
    )
    samples = training_samples(
        [(TokenFile(dataset / "train_text_document"), 1.0)], 4 * len(rates), 32, 1234
    )
    for number, rate in enumerate(rates):
        rows = torch.stack(
            [torch.from_numpy(samples.sample(4 * number + place)) for place in range(4)]
        )
        loss = F.cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        yield loss.item()


def rates_of(peak: float, count: int) -> list[float]:
    return [peak * min(step / 3, 1) for step in range(1, count + 1)]


@pytest.fixture(scope="module")
def hub(dataset: Path, uninterrupted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of a small GPT-2 with random weights and the dataset's tokenizer."""
    directory = export_checkpoint(uninterrupted, tmp_path_factory.mktemp("hub") / "gpt2")
    (directory / "model.safetensors").unlink()
    torch.manual_seed(3)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = GPT2Config(vocab_size=290, n_positions=32, n_embd=32, n_layer=2, n_head=4, **none)
    GPT2LMHeadModel(shape).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("layout", ["serial", "tp 2"])
def test_fine_tuning_equals_the_independent_loop(
    layout: str, hub: Path, dataset: Path, tmp_path: Path
) -> None:
    start = import_checkpoint(hub, tmp_path / "imported")
    config = small_config(dataset, {"dropout": 0.0}, init_from=str(start), **TRAIN)
    run = train_at(config, tmp_path / "runs", layout)
    expected = list(loop(GPT2LMHeadModel.from_pretrained(hub), dataset, rates_of(3e-3, 20)))
    assert [step.loss for step in read_steps(run)] == pytest.approx(expected, rel=0, abs=1e-12)
    assert expected[-1] < expected[0] - 0.5
    sampled = GPT2LMHeadModel.from_pretrained(
        export_checkpoint(run, tmp_path / "exported")
    ).generate(torch.tensor([[5, 6]]), max_new_tokens=5, do_sample=False)
    assert sampled.shape == (1, 7)
    assert resolve(config, 1).parents["init_from"] == read_digest(start)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_and_twenty_iterations_are_forty(layout: str, dataset: Path, tmp_path: Path) -> None:
    recipe: dict[str, Any] = TRAIN | {
        "decay": "clipped-cosine",
        "decay_iterations": 40,
        "precision": "fp32",
    }
    first = train_at(small_config(dataset, **recipe), tmp_path / "runs", layout)
    longer = small_config(dataset, **recipe | {"iterations": 40})
    second = train_at(continue_run(longer, first), tmp_path / "runs", layout)
    whole = train_at(longer, tmp_path / "whole", layout)
    shutil.rmtree(whole / "checkpoints" / "iter_0000020")
    assert_same_training(second, whole)
    assert second != first
    seam = [line for line in read_metrics(second) if line.get("warning")]
    assert [(line["iteration"], line["warning"]) for line in seam] == [
        (21, f"continues {first} from iteration 20")
    ]


def test_a_rate_and_a_batch_that_change_at_the_seam(
    hub: Path, dataset: Path, tmp_path: Path
) -> None:
    """Another rate equals the independent loop; another batch goes on with the samples that come
    next."""
    start = import_checkpoint(hub, tmp_path / "imported")
    recipe = TRAIN | {"init_from": str(start)}
    first = train_at(small_config(dataset, {"dropout": 0.0}, **recipe), tmp_path, "serial")
    changed = small_config(
        dataset, {"dropout": 0.0}, **recipe | {"iterations": 40, "learning_rate": 5e-4}
    )
    second = train_at(continue_run(changed, first), tmp_path, "tp 2")
    expected = list(
        loop(GPT2LMHeadModel.from_pretrained(hub), dataset, rates_of(3e-3, 20) + [5e-4] * 20)
    )
    assert [step.loss for step in read_steps(second)] == pytest.approx(expected, rel=0, abs=1e-12)
    wider = small_config(
        dataset, {"dropout": 0.0}, **recipe | {"iterations": 30, "global_batch_size": 8}
    )
    steps = read_steps(train_at(continue_run(wider, first), tmp_path, "dp 2"))
    assert [(step.iteration, step.samples) for step in steps[19:22]] == [
        (20, 80),
        (21, 88),
        (22, 96),
    ]
    assert steps[20].loss == pytest.approx((expected[20] + next_four(hub, dataset)) / 2, abs=1e-12)


def next_four(hub: Path, dataset: Path) -> float:
    """Loss of the samples 85 to 88 before update 21."""
    *_, last = loop(GPT2LMHeadModel.from_pretrained(hub), dataset, [*rates_of(3e-3, 20), 0.0, 0.0])
    return last


def test_what_cannot_be_started_from_is_refused(hub: Path, dataset: Path, tmp_path: Path) -> None:
    start = import_checkpoint(hub, tmp_path / "imported")
    other = write_dataset(tmp_path / "other", seed=7)
    cases = [
        (
            small_config(dataset, {"num_layers": 3}, init_from=str(start)),
            "model.num_layers is 2 there and 3 in this run",
        ),
        (small_config(other, init_from=str(start)), "another tokenizer"),
        (small_config(dataset, init_from=str(tmp_path / "none")), "no checkpoint directory"),
    ]
    for config, words in cases:
        with pytest.raises(BadInput, match=words):
            resolve(config, 1)
    run = train(small_config(dataset, iterations=8), tmp_path / "runs").path
    for changed, words in (
        ({"iterations": 8}, "iterations = 8 counts from the start of the continued run"),
        ({"iterations": 9, "precision": "bf16"}, "was trained in fp32"),
    ):
        with pytest.raises(BadInput, match=words):
            continue_run(small_config(dataset, **changed), run)


def test_more_iterations_of_a_complete_run_ask_to_continue_it(
    dataset: Path, tmp_path: Path
) -> None:
    toml = write_toml(tmp_path / "small.toml", dataset, iterations=8)
    run = ("run", toml, "--runs", tmp_path, "--ranks", 1)
    assert mlm_train(*run)[0] == 0
    code, _, err = mlm_train(*run, "--set", "train.iterations=12")
    assert (code, f"--continue {tmp_path / 'small'} trains the rest" in err) == (2, True)
    assert mlm_train(*run, "--set", "train.iterations=12", "--continue", tmp_path / "small")[0] == 0
    assert [step.iteration for step in read_steps(tmp_path / "small")] == list(range(1, 13))
    assert mlm_train("resume", tmp_path / "small")[:2] == (
        0,
        f"already complete: {(tmp_path / 'small').resolve()}\n",
    )
