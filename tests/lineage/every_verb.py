"""Something small for every verb to do, in a folder that has what it reads.

`python -m tests.lineage.every_verb` does all of it and prints how each ended.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.architecture.rooms import PACKAGE
from tests.chaos.job import write_tiny
from tests.commands import Program
from tests.data_pipeline.conftest import sentences
from tests.engine.conftest import write_dataset
from tests.engine.small_run import write_toml
from tests.evaluation.conftest import pass_for_published
from tests.experiments.packed import unpack
from tests.made_data import write_made_data

TRAINING = "runs/355m-tiny-387328e9"
DATASET = "runs/tiny-1d71ab2f"
REPRODUCTION = "runs/reproduce-355m-52c0de54"
TRAINED = "--set tokenizer.kind=train --set tokenizer.vocab_size=300"
SCORES = f"{REPRODUCTION}/evaluations"
SCORE = "wikitext103 --ckpt huggingface --limit 2 --set workers=1"
OF_A_READER = "jsonl:corpus.jsonl {out}"
"""What a verb of mlm-data that is one stage is given."""
WORK = {
    **{
        f"mlm-data {verb}": f"{OF_A_READER} --workers 1"
        for verb in ("c4", "clean", "dedup", "gopher", "language", "prose", "split")
    },
    "mlm-data run": "data.toml --runs {out}",
    "mlm-data length": f"{OF_A_READER} {TRAINED}",
    "mlm-data decontaminate": f"{OF_A_READER} --set decontaminate.test_sets=['jsonl:test.jsonl']",
    "mlm-data overlap": f"{OF_A_READER} --set overlap.test_sets=['jsonl:test.jsonl']",
    "mlm-data tokenize": f"{OF_A_READER} {TRAINED}",
    "mlm-data import": f"{DATASET}/train_text_document {{out}} --tokenizer {DATASET}/tokenizer",
    "mlm-data trace": f"{TRAINING} --step 2",
    "mlm-data stats": DATASET,
    "mlm-data fetch": "{out}",
    "mlm-train run": "small.toml --ranks 2 --runs {out}",
    "mlm-train resume": TRAINING,
    "mlm-train finetune": "mnli --ckpt bert --data mnli --set epochs=1",
    "mlm-train export": "checkpoint {out}",
    "mlm-train shard-hf": "huggingface {out} --tp 2",
    "mlm-train import": "huggingface {out}",
    "mlm-train schedule": "--pp 4 --microbatches 8",
    "mlm-train from-megatron": (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
        " --max-position-embeddings 32 --micro-batch-size 2 --train-iters 6 --lr 1e-3"
    ),
    "mlm-train to-megatron": "355m",
    "mlm-eval run": SCORE,
    "mlm-eval compare": f"{SCORES}/355m-wikitext103.json {SCORES}/355m-wikitext103.json",
    "mlm-eval identify": "--ckpt huggingface --claimed 37.50 --set workers=1",
    "mlm-eval oracle": "--out {out}",
    "mlm-eval generate": f"--ckpt {TRAINING} --max-new-tokens 2",
    "mlm-eval harness": (
        "--model mlm --model_args pretrained=huggingface,workers=1 --batch_size auto"
        " --limit 2 --tasks megatron_wikitext103"
    ),
    "mlm-eval fetch": "gpt2 --out {out}",
    "mlm-eval check": "lambada",
    "mlm-eval list": "",
    "mlm-experiment reproduce": "355m --smoke --data data.toml --runs {out}",
    "mlm-experiment sweep": "small.toml --vary train.seed=1,2 --runs {out}",
    "mlm-experiment launch": "355m --out {out}",
    "mlm-experiment simulate": "ptd-p-runs --out {out}",
    "mlm-experiment plan": "8.3b --cluster dgx-2h-v100 --gpus 512",
    "mlm-experiment list": "",
    "mlm-experiment run": "2021/table-1 --runs {out}",
    "mlm-experiment ablate": "transformer-xl/memory --dataset dataset --runs {out}",
    "mlm-experiment compare": "2021/table-1",
    "mlm-report build": f"{REPRODUCTION} --out {{out}}",
    "mlm-report run": TRAINING,
    "mlm-verify run": "runs",
    "mlm-verify replay": TRAINING,
    "mlm-verify explain": f"{TRAINING} {TRAINING}",
    "mlm-verify parallel": "small.toml --layouts tp2 --iterations 2",
    "mlm-verify against": "megatron-core small.toml --layout tp2 --iterations 2 --out {out}",
    "mlm-verify layouts": "megatron-core --layouts tp2",
}
"""What each verb is given; {out} is what it writes."""


ENDS = {
    "mlm-data c4": 2,  # keeps none of the made-up text
    "mlm-data prose": 2,
    "mlm-data fetch": 6,  # the made files are not the published ones
    "mlm-eval fetch": 7,  # no hub is reached
    "mlm-verify replay": 4,  # the training took place on another machine
    "mlm-verify explain": 2,  # both runs are one
}
"""Exit codes of verbs that do not end with 0."""
LONG = {"mlm-experiment ablate": 30.0, "mlm-experiment reproduce": 90.0}
"""Verbs that train for minutes, with the seconds that they are watched, after which they are
ended."""


def every_verb() -> Iterator[tuple[str, str, str]]:
    """Each verb of each program, with the module and the name of its function."""
    for script in entry_points(group="console_scripts"):
        if script.value.startswith(PACKAGE):
            module = script.value.partition(":")[0]
            for command in import_module(module).app.registered_commands:
                name = command.callback.__name__
                yield f"{script.name} {command.name or name.replace('_', '-')}", module, name


def prepare(folder: Path) -> Path:
    """Write what the verbs read into a folder."""
    from mlm_repro.engine.formats.convert import export_checkpoint
    from tests.engine.test_finetune import write_bert, write_mnli
    from tests.engine.test_formats_checkpoint import write_rough

    unpack(folder)
    write_tiny(folder)
    (folder / "test.jsonl").write_text(f'{{"text": "{sentences(20, 1)}"}}\n', encoding="utf-8")
    write_toml(
        folder / "small.toml", write_dataset(folder / "dataset"), iterations=6, warmup_iterations=1
    )
    write_rough(folder / "checkpoint")
    export_checkpoint(folder / "checkpoint", folder / "huggingface")
    write_bert(folder / "bert")
    write_mnli(folder / "mnli", 12)
    write_made_data(folder / "published")
    return folder


def as_published(data: Path) -> None:
    """Let the made files pass for the published ones in this process."""
    pass_for_published(data, pytest.MonkeyPatch())


def nothing() -> None:
    """Do nothing."""


def start(verb: str, folder: Path, *further: str, first: Callable[[], object] = nothing) -> Program:
    """Start a verb in the folder, with `further` words, in a process that calls `first`."""
    program, name = verb.split()
    words = WORK[verb].format(out=f"out-{program}-{name}{'-'.join(further)}").split()
    begin = partial(_begin, folder, first)
    return Program(program, name, *words, *further, folder=folder, prepare=begin)


def _begin(folder: Path, first: Callable[[], object]) -> None:
    as_published(folder / "published")
    first()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        prepare(Path(place))
        for each in sys.argv[1:] or WORK:
            began = time.monotonic()
            process = start(each, Path(place))
            process.wait(600)
            last = (process.err.strip() or "nothing").splitlines()[-1]
            print(f"{each}: {process.wait()}, {time.monotonic() - began:.1f} s: {last}", flush=True)
