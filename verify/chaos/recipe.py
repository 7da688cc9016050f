"""A reproduction so small that it is over in two seconds: a corpus, a dataset, two ranks, two evaluations, a page."""

import json
import random
import shutil
from pathlib import Path

from engine.run.resolved import read_run_config
from experiments.reproduce.plan import Plan, Size
from lineage.shipped import model_file

RUNS = Path("runs")
RANKS = 2
WORDS = (
    "river", "house", "stone", "walks", "sleeps", "under", "over", "bright", "old", "wind", "and", "then", "slowly",
    "the", "child", "reads", "while", "evening", "sings", "of", "green", "hills", "beyond", "a", "quiet", "harbour",
    "where", "boats", "wait",
)  # fmt: skip
OVERRIDES = (
    "model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "model.seq_length=32", "train.iterations=6",
    "train.warmup_iterations=1", "train.validation_interval=3", "train.validation_samples=8",
    "train.checkpoint_interval=2", "train.global_batch_size=4", "train.microbatch_size=2",
)  # fmt: skip


def write_tiny(folder: Path) -> None:
    """The input: 24 documents of made-up English, two of them nearly alike, and the data recipe."""
    random_words = random.Random(1)
    texts = [
        ". ".join(" ".join(random_words.choices(WORDS, k=random_words.randint(8, 14))) for _ in range(30))
        for _ in range(23)
    ]
    texts.append(texts[3].replace("river", "rivers", 1))
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    shutil.copyfile(Path(__file__).with_name("tiny.toml"), folder / "data.toml")


def tiny_plan(ranks: int = RANKS) -> Plan:
    """The twin of the 355M model at its very smallest, tensor-parallel, in the current folder.

    On one rank the batch is one microbatch, so that `mlm-train` starts no others.
    """
    overrides = (*OVERRIDES, f"parallel.tp={ranks}", *(() if ranks > 1 else ("train.microbatch_size=4",)))
    size = Size(Path("data.toml"), "tiny", overrides, windows=4, examples=4)
    published = read_run_config(model_file("355m"))
    config = read_run_config(model_file("355m"), ["name=355m-tiny", *overrides], twin=True)
    return Plan(
        target="355m", mode="scaled", possible=False, reason="asked for", recipe=size.recipe, size=size,
        published=(published,), configs=(config,),
    )  # fmt: skip
