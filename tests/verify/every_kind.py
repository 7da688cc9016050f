"""A folder of honest runs of every kind: made by the code as it is, by an earlier version, and the
kept ones.

`python -m tests.verify.every_kind FOLDER` makes them in FOLDER/runs, in half a minute.
"""

import shutil
import sys
from pathlib import Path

from mlm_repro.experiments.catalogue import find_experiment
from mlm_repro.experiments.runner import run_named
from mlm_repro.lineage.files import read_object
from mlm_repro.lineage.run import MANIFEST
from tests.architecture.rooms import ROOT
from tests.chaos.job import start_job, wait_for, write_tiny
from tests.commands import call
from tests.experiments.packed import unpack

RESULTS = ROOT / "results"
KEPT = (
    "reproduce-8.3b",
    "against/against-*-tp2-*",
    "against/engines-forecast-*",
    "ablations/ablation-forecast-*",
    "ablations/*memory-effects-*",
    "ablations/experiments",
)
"""Of each of these patterns the first is taken."""
VOCABULARY = ("--set", "tokenizer.kind=train", "--set", "tokenizer.vocab_size=300")
VERBS = {
    "clean": ("jsonl:corpus.jsonl",),
    "gopher": ("documents:clean",),
    "length": ("documents:clean", *VOCABULARY),
    "language": ("documents:clean",),
    "dedup": ("documents:clean",),
    "decontaminate": ("documents:dedup", "--set", "decontaminate.test_sets=['jsonl:test.jsonl']"),
    "split": ("documents:decontaminate",),
    "tokenize": ("documents:split", *VOCABULARY),
    "overlap": ("jsonl:corpus.jsonl", "--set", "overlap.test_sets=['jsonl:test.jsonl']"),
    "import": ("tokenize/train_text_document", "--tokenizer", "tokenize/tokenizer"),
}
"""What each verb of mlm-data is given; a name is the directory that the verb of this name wrote."""


def every_kind(folder: Path) -> Path:
    """Make runs of every kind in a new folder, and return the folder of them."""
    folder.mkdir()
    folder, runs = folder.resolve(), folder.resolve() / "runs"
    write_tiny(folder)
    (code,) = wait_for([start_job(folder, folder / "log", None, ranks=1)])
    assert not code, (folder / "log").read_text()[-2000:]
    corpus = (folder / "corpus.jsonl").read_text().splitlines(keepends=True)
    (folder / "test.jsonl").write_text("".join(corpus[:2]))
    for verb, (source, *words) in VERBS.items():
        given = source.replace(":", f":{folder if '.' in source else runs}/")
        given = given if ":" in given else str(runs / given)
        words = [str(runs / word) if word.startswith("tokenize/") else word for word in words]
        words = [word.replace("jsonl:", f"jsonl:{folder}/") for word in words]
        call({}, "mlm-data", verb, given, runs / verb, *words, ends=0)
    run_named([find_experiment("2021/figure-6")], runs)
    for pattern in KEPT:
        kept = min(RESULTS.glob(pattern))
        shutil.copytree(kept, runs / kept.name)
    earlier = unpack(folder / "earlier") / "runs"
    for run in earlier.iterdir():
        if not (runs / run.name).exists():
            run.rename(runs / run.name)
    return runs


def kind_in(run: Path) -> str:
    """The kind in the manifest of a run."""
    return str(read_object(run / MANIFEST)["kind"])


if __name__ == "__main__":
    made = every_kind(Path(sys.argv[1]))
    for run in sorted(path for path in made.glob("[!.]*") if not path.is_symlink()):
        print(f"{kind_in(run)} {run}")
