"""Valid files of tests, of tasks and of what stands on a page, and how they are read."""

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import orjson

from mlm_repro.data_pipeline.contamination import decontaminate
from mlm_repro.data_pipeline.reading.file_sources import FileSource
from mlm_repro.data_pipeline.reading.readers import read_pieces
from mlm_repro.data_pipeline.tokens.trace import trace_iteration
from mlm_repro.data_pipeline.work.tasks import MARKER as TASK_MARKER
from mlm_repro.data_pipeline.work.tasks import WorkTask, run_task
from mlm_repro.data_pipeline.work.workspace import Workspace
from mlm_repro.engine.finetune.tasks import read_mnli, read_race, read_squad
from mlm_repro.evaluation.protocol import Scores
from mlm_repro.evaluation.scoring.store import StoredScores
from mlm_repro.evaluation.tasks import heldout
from mlm_repro.experiments.catalogue import find_experiment
from mlm_repro.experiments.sealed import lines, seal_numbers
from mlm_repro.experiments.verdicts import load_results
from mlm_repro.lineage.digest import MARKER, seal
from mlm_repro.lineage.run import MANIFEST
from mlm_repro.reports.engines import engines_exhibit
from mlm_repro.reports.figures import draw
from mlm_repro.reports.report import Inputs
from tests.architecture.rooms import ROOT
from tests.engine import test_finetune as tuned
from tests.experiments.packed import REPRODUCTION, TRAINING, packed
from tests.reader import Reader, bytes_at


def compared(folder: Path) -> Path:
    run = shutil.copytree(
        next((ROOT / "results" / "against").glob("against-*-500-*")), folder / "against"
    )
    return run / "against.json"


def read_compared(path: Path) -> object:
    """As it stands on a page."""
    return draw(engines_exhibit(path.parent).panels)


def sealed_numbers(name: str) -> Callable[[Path], Path]:
    def prepare(folder: Path) -> Path:
        experiment = find_experiment("2021/figure-6")
        return (
            seal_numbers(experiment, "", lines("a", {"b": 1.0}), folder / "theirs")[0].path / name
        )

    return prepare


def read_elsewhere(path: Path) -> object:
    seal(path.parent)
    return load_results([path.parent])


def sources(folder: Path) -> Path:
    run = packed(f"{REPRODUCTION}/{MANIFEST}")(folder).parent
    (run / "report").mkdir()
    return bytes_at("sources.json", b'{"runs": ["../other"]}')(run / "report")


def traced(path: Path) -> object:
    return list(trace_iteration(path.parent, 2))


def questions(folder: Path) -> Path:
    tuned.write_squad(folder / "squad", "v2.0")
    return folder / "squad" / "train-v2.0.json"


def comprehension(folder: Path) -> Path:
    tuned.write_race(folder / "race")
    return folder / "race" / "train" / "middle" / "1.txt"


def entailment(folder: Path) -> Path:
    tuned.write_mnli(folder / "mnli")
    return folder / "mnli" / "train.tsv"


def written_by_a_verb(folder: Path) -> Path:
    (folder / "shard-00000.jsonl").write_text(
        '{"text": "a fine text", "id": "a"}\n', encoding="utf-8"
    )
    seal(folder)
    return folder / MARKER


def read_written(path: Path) -> object:
    pieces = FileSource(f"documents:{path.parent}").pieces(Workspace(path.parent, None), 1 << 16)
    return list(read_pieces(pieces, 1 << 15))


def write_one(settings: object, inputs: object, directory: Path) -> dict[str, int]:
    (directory / "a").write_bytes(b"a")
    return {"documents": 1}


def task_of(folder: Path) -> WorkTask:
    return WorkTask(write_one, {}, (), folder / "task")


def task_marker(folder: Path) -> Path:
    return run_task(task_of(folder)).path / TASK_MARKER


def scores(folder: Path) -> Path:
    flags = np.ones(3, dtype=np.bool_)
    with closing(StoredScores(folder / "kept")) as store:
        for batch in range(2):
            store.add(batch, Scores(-np.arange(3.0), flags, flags, np.array([3])))
    (path,) = (folder / "kept").iterdir()
    return path


def read_scores(path: Path) -> None:
    found = StoredScores(path.parent).read([np.array([3])] * 2)
    if not all(kept.log_probabilities.tolist() == [-0.0, -1.0, -2.0] for kept in found.values()):
        raise AssertionError("a record that nobody wrote is believed")


DOCUMENTS = b"".join(
    orjson.dumps({"text": f"a fine text of {n} words and more"}) + b"\n" for n in range(4)
)
ARTICLES = (
    b" \n = A title = \n \n a fine <unk> text \n = = A part = = \n another \n \n = B title = \n \n"
    b" more \n"
)
READERS = (
    Reader("engines beside each other", compared, read_compared, 5),
    *(
        Reader(f"results {name}", sealed_numbers(name), read_elsewhere, 20)
        for name in (MANIFEST, "records.jsonl")
    ),
    Reader("sources of a report", sources, lambda path: Inputs.of_built(path.parent.parent), 50),
    *(
        Reader(f"traced {name}", packed(f"{TRAINING}/{name}"), traced, 10)
        for name in (MANIFEST, "metrics.jsonl", "summary.json")
    ),
    Reader("SQuAD", questions, read_squad, 50),
    Reader("RACE", comprehension, lambda path: read_race(path.parent), 50),
    Reader("MNLI", entailment, read_mnli, 50),
    Reader("test set", bytes_at("a.jsonl", DOCUMENTS), decontaminate.read_documents, 100),
    Reader("WikiText", bytes_at("a.tokens", ARTICLES), decontaminate.read_documents, 100),
    Reader("held-out documents", bytes_at("a.jsonl", DOCUMENTS), heldout.read_texts, 100),
    Reader("documents of a verb", written_by_a_verb, read_written, 50),
    Reader("marker of a task", task_marker, lambda path: run_task(task_of(path.parent.parent)), 50),
    Reader("kept scores", scores, read_scores, 100),
)
