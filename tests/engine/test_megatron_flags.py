"""Megatron-LM's command lines become configurations, and those command lines that become the same
configurations."""

import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlm_repro.engine.batch_schedule import BatchSchedule
from mlm_repro.engine.cli import main
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.megatron_flags import from_megatron, read_script, to_megatron
from mlm_repro.engine.optim.schedule import clock, learning_rate
from mlm_repro.engine.run.resolved import read_run_config
from mlm_repro.lineage.config import load_config, override_config, parse_config
from mlm_repro.lineage.errors import BadInput
from tests.commands import Command

SCRIPTS: dict[str, str] = tomllib.loads(
    Path(__file__).with_name("megatron_scripts.toml").read_text(encoding="utf-8")
)
TABLE_1 = [name for name in SCRIPTS if "table_1" in name]
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 9 --lr 1e-3"
)


def config_of(name: str) -> RunConfig:
    return from_megatron(shlex.split(SCRIPTS[name])).config


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_translated_or_refused(name: str) -> None:
    """A translation of a translation is the first; a refusal names each flag of the other model."""
    unknown = ("swiglu", "rope", "rotary", "RMSNorm", "query-groups", "moe", "use-mup", "untie")
    strange = [flag for flag in unknown if flag in SCRIPTS[name]]
    if strange:
        with pytest.raises(BadInput, match="ask for another model or another training") as refusal:
            config_of(name)
        assert all(flag in str(refusal.value) for flag in strange)
        return
    if "--rampup" in SCRIPTS[name] and "--train-iters" in SCRIPTS[name]:
        with pytest.raises(BadInput, match="--rampup-batch-size needs --train-samples"):
            config_of(name)
        return
    config = config_of(name)
    line = to_megatron(config)
    assert from_megatron(line.words).config == config
    assert to_megatron(from_megatron(line.words).config) == line


def their_scheduler(words: list[str]) -> tuple[Any, dict[str, Any]]:
    """Megatron-Core's scheduler, made of flags as `get_optimizer_param_scheduler` of Megatron-LM's
    training.py does."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    given: dict[str, Any] = {}
    for place, word in enumerate(words):
        if word.startswith("--"):
            given[word[2:]] = words[place + 1] if place + 1 < len(words) else ""
    old = {"batch-size": "micro-batch-size", "warmup": "lr-warmup-fraction"}
    given = {old.get(name, name): value for name, value in given.items()}
    batch = int(given.get("global-batch-size", given["micro-batch-size"]))
    unit, size = ("samples", 1) if "train-samples" in given else ("iters", batch)
    decay = int(given.get(f"lr-decay-{unit}", given[f"train-{unit}"])) * size
    warmup: float = int(given.get(f"lr-warmup-{unit}", 0)) * size
    if "lr-warmup-fraction" in given:
        warmup = float(given["lr-warmup-fraction"]) * decay
    wsd = given.get(f"lr-wsd-decay-{unit}")
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group := {"wd_mult": 1.0}]),
        init_lr=0.0,
        max_lr=float(given["lr"]),  # type: ignore[arg-type]
        min_lr=float(given.get("min-lr", 0)),
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,  # type: ignore[arg-type]
        lr_decay_style=given.get("lr-decay-style", "linear"),
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=1,
        wd_incr_style="constant",
        wsd_decay_steps=int(wsd) * size if wsd else None,
        lr_wsd_decay_style=given.get("lr-wsd-decay-style", "exponential"),
    )
    return scheduler, group


STYLES = [
    f"--lr-decay-style {style} {unit}"
    for style in (
        "linear",
        "cosine",
        "constant",
        "inverse-square-root",
        "WSD --lr-wsd-decay-iters 30",
        "WSD --lr-wsd-decay-iters 7 --lr-wsd-decay-style minus_sqrt",
        "WSD --lr-wsd-decay-iters 50 --lr-wsd-decay-style linear",
        "WSD --lr-wsd-decay-iters 50 --lr-wsd-decay-style cosine",
    )
    for unit in ("--lr-warmup-iters 9", "--lr-warmup-fraction 0.0131", "--lr-decay-iters 80", "")
]
RATES = (
    {name: text for name, text in SCRIPTS.items() if "--lr " in text}
    | {
        text: (
            f"{SMALL.replace('--train-iters 9', '--train-iters 100')} --global-batch-size 6"
            f" --min-lr 1e-5 {text}"
        )
        for text in STYLES
    }
    | {
        f"growing, {start} samples": (
            f"{SMALL.replace('--train-iters 9', '--train-samples 4001')} --global-batch-size 16"
            f" --rampup-batch-size {start} 4 1000 --lr-warmup-samples 601 --lr-decay-samples 3500"
            " --lr-decay-style cosine"
        )
        for start in (4, 8)
    }
)


@pytest.mark.parametrize("name", RATES)
def test_every_rate_is_megatron_cores(name: str) -> None:
    """Over the whole training where it is short, else at each of 2,000 iterations and at those
    around every bend."""
    words = shlex.split(RATES[name])
    try:
        train = from_megatron(words).config.train
    except BadInput:
        return  # in words, which another test reads
    scheduler, group = their_scheduler(words)
    batches, batch = BatchSchedule(train), train.global_batch_size
    bends = [
        train.warmup_iterations,
        train.decay_iterations or 0,
        (train.decay_iterations or train.iterations) - (train.wsd_iterations or 0),
        0,
        train.iterations,
    ]
    near = {
        min(max(int(bend) + by, 0), train.iterations - 1) for bend in bends for by in range(-3, 4)
    }
    for iteration in sorted(near | {*range(0, train.iterations, max(train.iterations // 2000, 1))}):
        samples = batches.samples_before(iteration)
        scheduler.num_steps = samples
        scheduler.step(0)
        ours = learning_rate(train, clock(train, iteration, samples))
        assert ours == pytest.approx(group["lr"], rel=1e-12, abs=1e-18), (iteration, samples, batch)


def test_the_scripts_of_2019_and_of_gpt_3() -> None:
    first = config_of("v1.0:examples/pretrain_gpt2.sh")
    assert (
        first.model.num_layers,
        first.model.hidden_size,
        first.model.num_heads,
        first.model.seq_length,
    ) == (
        24,
        1024,
        16,
        1024,
    )
    assert (first.train.microbatch_size, first.train.warmup_iterations, first.train.precision) == (
        8,
        3200,
        "fp16",
    )
    assert (first.train.learning_rate, first.train.min_learning_rate, first.train.decay) == (
        1.5e-4,
        1e-5,
        "cosine",
    )
    assert (first.parallel.recompute, first.train.validation_samples) == ("full", 80)
    largest = config_of("v2.0:examples/pretrain_gpt3_175B.sh")
    assert largest.train.rampup_batch_size == (16, 16, 5859375)
    assert (largest.parallel.tp, largest.parallel.pp, largest.train.adam_beta2) == (8, 16, 0.95)
    # 146,484,375 samples in batches of 1,536, and 3,814,697 iterations' worth less while the batch
    # grows
    assert 146_484_375 / 1536 < largest.train.iterations < 146_484_375 / 1536 + 5_859_375 / 16


@pytest.mark.parametrize("name", TABLE_1)
def test_the_published_table_has_the_scripts_models(name: str) -> None:
    recipes = {
        path.stem: load_config(path, RunConfig)
        for path in Path("experiments/models/ptd-p").glob("*.toml")
    }
    script = config_of(name)
    same = [
        recipe
        for recipe in recipes.values()
        if recipe.model.model_dump(include={"num_layers", "hidden_size", "num_heads", "seq_length"})
        == script.model.model_dump(include={"num_layers", "hidden_size", "num_heads", "seq_length"})
    ]
    assert len(same) == 1
    assert (same[0].parallel.tp, same[0].parallel.pp) == (script.parallel.tp, script.parallel.pp)


@pytest.mark.parametrize("model", ["355m", "2.5b", "8.3b"])
def test_ours_go_there_and_come_back(model: str) -> None:
    config = read_run_config(model)
    line = to_megatron(config)
    back = from_megatron(line.words).config
    lost = {"clipped-cosine": "cosine"}
    expected = config.model_copy(
        update={
            "name": "megatron",
            "data": back.data,
            "train": config.train.model_copy(
                update={
                    "decay": lost.get(config.train.decay, config.train.decay),
                    "clock": "samples",
                    "keep_checkpoints": back.train.keep_checkpoints,
                }
            ),
        }
    )
    assert back == expected
    assert ("clipped" in " ".join(line.missing)) == (config.train.decay in lost)


SCRIPT = r"""
#!/bin/bash
# trains --num-layers 1 of nothing
export LAYERS=2
GPUS=${SLURM_GPUS:-8}
MODEL=(
    --num-layers $LAYERS   # two
    --hidden-size 64 --num-attention-heads 4
    --seq-length 32
)
OPTIONS=" \
    --micro-batch-size 2 --lr 1e-3 \
    --train-iters 9 --save $1 --num-workers ${GPUS}"
torchrun --nproc_per_node $GPUS "/opt/pretrain_gpt.py" "${MODEL[@]}" \
    $OPTIONS --log-interval 1 2>&1 | tee --append log
"""


def test_a_script_is_read_and_not_run(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT + f"touch {tmp_path / 'run'}\n")
    done = command(main, "mlm-train", "from-megatron", path)
    assert (done.code, done.err) == (0, "")
    (tmp_path / "config.toml").write_text(done.out)
    assert (
        load_config(tmp_path / "config.toml", RunConfig) == from_megatron(shlex.split(SMALL)).config
    )
    assert "# without effect on the result: --num-workers 8\n" in done.out
    assert not (tmp_path / "run").exists()
    assert read_script("--lr 1 --fp16") == ["--lr", "1", "--fp16"]


def test_the_script_of_another_program_is_refused(tmp_path: Path, command: Command) -> None:
    """Megatron-LM's example of BERT has flags that would also make a GPT."""
    path = tmp_path / "train_bert.sh"
    path.write_text(SCRIPT.replace("pretrain_gpt.py", "pretrain_bert.py"))
    done = command(main, "mlm-train", "from-megatron", path)
    assert (done.code, done.out) == (2, "")
    assert (
        done.error == "error: the script's last call is of pretrain_bert.py, and only a call of"
        " pretrain_gpt.py is translated"
    )


def test_another_model_is_refused_with_the_list_and_without_a_file(command: Command) -> None:
    done = command(
        main,
        "mlm-train",
        "from-megatron",
        *shlex.split(SMALL),
        "--swiglu",
        "--position-embedding-type",
        "rope",
        "--ffn-hidden-size",
        100,
        "--use-flash-attn",
        "--norm-epsilon",
        "0.00001",
        "--loss-scale",
        128,
    )
    assert (done.code, done.out) == (2, "")
    assert (
        done.error
        == "error: these flags are unknown, or ask for another model or another training than this"
        " program has: --ffn-hidden-size 100 has no counterpart here: it is always four times"
        " --hidden-size;"
        " --position-embedding-type rope has no counterpart here; --swiglu has no counterpart"
        " here. Leave them out to translate the others"
    )


def test_weights_and_schedule_are_translated(command: Command) -> None:
    constant = "--lr-decay-style constant --lr-decay-iters 8 --loss-scale 128"
    done = command(
        main,
        "mlm-train",
        "from-megatron",
        *shlex.split(f"{SMALL} {constant} --load there --finetune"),
    )
    config = parse_config(tomllib.loads(done.out), RunConfig, "the answer")
    assert (config.train.decay, config.train.decay_iterations, config.train.init_from) == (
        "constant",
        8,
        Path("there"),
    )
    assert done.err.splitlines() == [
        "warning: --load there becomes train.init_from, which takes a checkpoint of this engine:"
        " name there the one that `mlm-train import` makes of it",
        "warning: --loss-scale 128 has no counterpart here",
    ]
    assert from_megatron(to_megatron(config).words).config == config
    same = from_megatron(shlex.split(f"{SMALL} --load here --save here"))
    assert (same.config.train.init_from, same.missing) == (None, [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (SMALL.replace("--lr 1e-3", ""), "--lr needs one value, and the arguments give it nothing"),
        (
            SMALL.replace("9", "$ITERATIONS"),
            "--train-iters needs one value, and the arguments give it $ITERATIONS",
        ),
        (SMALL.replace("9", "nine"), "--train-iters is 'nine', not a finite number"),
        (SMALL.replace("64", "63"), "hidden_size = 63 is not a multiple of num_heads = 4"),
        (SMALL + " --rampup-batch-size 2 2 many", "rampup_batch_size"),
        (SMALL + " --lr-warmup-iters many", "--lr-warmup-iters is 'many', not a finite number"),
        (SMALL + " --lr-warmup-samples 9", "--lr-warmup-samples does not go with --train-iters"),
        (
            SMALL + " --lr-warmup-iters 2 --lr-warmup-fraction 0.1",
            "--lr-warmup-fraction does not go with",
        ),
        (
            SMALL + " --rampup-batch-size 2 2 8 --global-batch-size 4",
            "--rampup-batch-size needs --train-samples",
        ),
        (
            SMALL + " --lr-decay-style WSD",
            "decay = 'WSD' needs wsd_iterations, the length of its fall",
        ),
        (SMALL + " --lr-decay-style polynomial", "decay"),
        (SMALL + " --lr-warmup-fraction nan", "--lr-warmup-fraction is 'nan', not a finite number"),
        (SMALL.replace("-iters 9", "-iters inf"), "--train-iters is 'inf', not a finite number"),
        ("train --lr 1", "'train' comes before the first flag"),
        ("nowhere.sh", "nowhere.sh cannot be read as a script: No such file or directory"),
    ],
)
def test_bad_arguments_get_one_sentence(words: str, said: str, command: Command) -> None:
    done = command(main, "mlm-train", "from-megatron", *shlex.split(words))
    assert (done.code, done.out, done.err.count("\n"), said in done.err) == (2, "", 1, True)
    assert said in done.err


def test_another_family_is_refused() -> None:
    with pytest.raises(BadInput, match="the model is a bert, and"):
        to_megatron(read_run_config("bert-336m"))


@pytest.mark.parametrize("clock_name", ["updates", "samples"])
def test_a_growing_batch_is_written_in_samples_as_megatron_takes_it(clock_name: str) -> None:
    """`arguments.py` asserts that a batch that grows comes with --train-samples, and with no length
    in iterations."""
    values = {
        "iterations": 40,
        "global_batch_size": 16,
        "microbatch_size": 4,
        "rampup_batch_size": [4, 4, 90],
        "clock": clock_name,
        "decay": "WSD",
        "wsd_iterations": 10,
        "warmup_iterations": 5,
    }
    model = {"num_layers": 2, "hidden_size": 64, "num_heads": 4}
    line = to_megatron(
        parse_config({"name": "x", "model": model, "train": values}, RunConfig, "here")
    )
    lengths = [
        word
        for word in line.words
        if word.endswith(("-iters", "-samples")) and word != "--eval-iters"
    ]
    assert sorted(lengths) == [
        "--lr-decay-samples",
        "--lr-warmup-samples",
        "--lr-wsd-decay-samples",
        "--train-samples",
    ]
    assert line.words[line.words.index("--lr-warmup-samples") + 1] == "80"
    assert any(
        "train.clock = 'updates': with them Megatron-LM has 'samples'" in said
        for said in line.missing
    ) == (clock_name == "updates")
    back = from_megatron(line.words).config.train
    assert (back.iterations, back.rampup_batch_size, back.wsd_iterations) == (40, (4, 4, 90), 10)


def test_a_schedule_without_warm_up_is_translated_where_no_length_is_whole() -> None:
    changed = ("clock=samples", "warmup_iterations=0", "decay_iterations=50.03")
    batch = ("iterations=60", "global_batch_size=8", "microbatch_size=1")
    sets = [f"train.{each}" for each in (*changed, *batch)]
    words = to_megatron(override_config(read_run_config("355m"), sets)).words
    assert words[words.index("--lr-warmup-fraction") + 1] == "0.0"
    assert words[words.index("--lr-decay-samples") + 1] == "400"
