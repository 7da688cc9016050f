"""Small commands in processes of their own, for which people wait, and a job from its call to its first iteration."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory

from benchmarks.contenders import in_turn
from benchmarks.timing import child_seconds, ratio, series
from mlm_repro.engine.run.files import read_steps
from mlm_repro.evaluation.conventions.oracle import FILES
from mlm_repro.experiments.benchmark import Benchmark, Case
from mlm_repro.lineage.environment import user_cache
from mlm_repro.lineage.errors import Interrupted, UserError
from mlm_repro.lineage.processes import end_with_parent
from mlm_repro.lineage.progress import announce

BIN = Path(sys.executable).parent
PROGRAMS = ("mlm-data", "mlm-train", "mlm-eval", "mlm-experiment", "mlm-report", "mlm-verify")
EMPTY = "import typer\napp = typer.Typer()\napp.command()(lambda: None)\napp()"
LOADED = """
import sys, torch
from pathlib import Path
from mlm_repro.evaluation.checkpoints import open_checkpoint
from mlm_repro.evaluation.models.places import Place
from mlm_repro.evaluation.settings import Settings
open_checkpoint(Place.find(Path(sys.argv[1])), Settings())
"""
LISTED = """
import sys
from pathlib import Path
from mlm_repro.data_pipeline.cli import main
try:
    main()
finally:
    Path(sys.argv[-1], "modules").write_text(" ".join(sys.modules))
"""
IMPORTED = """
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
for name in Path(sys.argv[1]).read_text().split():
    with suppress(ImportError):
        import_module(name)
"""
RECIPE = """name = "few"
workers = 1
sources.names = ["jsonl:{}"]
tokenizer = {{kind = "train", vocab_size = 300}}
split = {{train = 4, valid = 1}}
"""
JOB = """name = "small"
model = "355m"
dataset = "{0}/few"
runs = "{0}"
nodes = 1
ranks_per_node = 2
gpus = false
cores_per_rank = 1
overrides = {1}
"""
SMALL = (
    "model.num_layers=2 model.hidden_size=32 model.num_heads=2 model.seq_length=32 train.iterations=1000000 "
    "train.global_batch_size=2 train.microbatch_size=1 train.precision=fp32 train.validation_samples=2"
)
NOTES = [
    "Seconds are processor seconds of a command and its children, or for the job those of a clock. Each command is "
    "called once before, which compiles and remembers what later calls find; a page from nothing finds none of it. "
    "Contenders come in turn.",
]
Seconds = Callable[[], float]


def measure(rounds: int) -> Benchmark:
    """Measure every command `rounds` times."""
    announce(f"{len(PROGRAMS) + 7} small commands, {rounds} times each")
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        texts = [json.dumps({"text": topics[each]}) for each in sorted(topics)[:20]]
        (folder / "few.jsonl").write_text("\n".join(texts))
        (folder / "few.toml").write_text(RECIPE.format(folder / "few.jsonl"))
        (folder / "text").write_text(topics["class"][:3000])
        (folder / "job.toml").write_text(JOB.format(folder, json.dumps(SMALL.split())))
        numbers = count()

        def build() -> float:
            return child_seconds(BIN / "mlm-data", "run", folder / "few.toml", "--runs", folder / f"{next(numbers)}")

        def draw() -> float:
            for figure in user_cache("answers").glob("figure-*"):
                figure.unlink()
            return child_seconds(*page, folder / f"{next(numbers)}")

        page = (BIN / "mlm-report", "build", "--kept", "--out")
        model = FILES / "model"
        score = (BIN / "mlm-eval", "perplexity", folder / "text", "--ckpt", model)
        empty = partial(child_seconds, sys.executable, "-c", EMPTY, "--help")
        child_seconds(sys.executable, "-c", LISTED, "run", folder / "few.toml", "--runs", folder / "listed")
        imports = partial(child_seconds, sys.executable, "-c", IMPORTED, folder / "listed" / "modules")
        cases = [
            *(case(f"{each} --help", rounds, partial(child_seconds, BIN / each, "--help"), 1.3, "an empty program",
                   empty) for each in PROGRAMS),
            case("mlm-experiment list", rounds, partial(child_seconds, BIN / "mlm-experiment", "list"), 0.5),
            case("mlm-data run, 20 documents", rounds, build, 2.5),
            case("the same, past its imports", rounds, lambda: build() - imports(), 0.8),
            case("mlm-eval perplexity, 3 kB", rounds, partial(child_seconds, *score), 1.3,
                 "torch and the model", partial(child_seconds, sys.executable, "-c", LOADED, model)),
            case("a page from nothing", rounds, draw, 15.0),
            case("the same page again", rounds, partial(child_seconds, *page, folder / "page"), 3.0),
        ]  # fmt: skip
        child_seconds(BIN / "mlm-data", "run", folder / "few.toml", "--runs", folder)
        child_seconds(BIN / "mlm-experiment", "launch", folder / "job.toml", "--out", folder / "launch")
        cases.append(case("a job's relaunch", rounds, partial(relaunch, folder), 30.0))
    return Benchmark(benchmark="start", title="Small commands", cases=cases, notes=NOTES, setting={"rounds": rounds})


def case(
    name: str, rounds: int, ours: Seconds, goal: float, rival: str = "a second", theirs: Seconds | None = None
) -> Case:
    """Time a command in turn with a rival, if it has one; it may take `goal` times its seconds, or so many seconds."""
    contenders = {"ours": ours} | ({rival: theirs} if theirs else {})
    for run in contenders.values():
        run()
    taken = in_turn(name, rounds, contenders)
    return Case(
        name=name,
        series=[series(each, "time", "s", *many) for each, many in taken.items()],
        ratios=[ratio(f"× {rival}", taken["ours"], taken.get(rival, [1.0] * rounds), goal, less_is_better=True)],
    )


def relaunch(folder: Path) -> float:
    """Launch the job again from its checkpoint and end it; the seconds from the call to its first new iteration."""

    def iterations() -> int:
        return max((len(read_steps(run)) for run in folder.glob("355m-*")), default=0)

    before, start = iterations(), time.monotonic()
    command, log = ["bash", str(folder / "launch" / "torchrun.sh")], folder / "log"
    with (
        log.open("a") as file,
        subprocess.Popen(command, stdout=file, stderr=file, preexec_fn=end_with_parent) as process,
    ):
        while iterations() <= before and process.poll() is None:
            time.sleep(0.05)
        seconds = time.monotonic() - start
        process.send_signal(signal.SIGTERM)
    if process.returncode != Interrupted.exit_code:
        raise UserError(f"the job ended with code {process.returncode}: {log.read_text()[-2000:]}")
    return seconds
