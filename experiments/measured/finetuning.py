"""BERT's tasks on the twin of BERT 336M, from initial weights, on generated files in the tasks' own formats.

The answers follow from statements such as "the cat is red". The numbers show that fine-tuning learns, not how well a
published model would do.
"""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from data_pipeline.tokens.tokenizer import Tokenizer
from engine.families.bert.model import BERT
from engine.finetune.tasks import TASKS, FineTuneRecipe
from engine.finetune.train import finetune
from engine.formats import Imported, write_checkpoint
from engine.parallel.mesh import serial_mesh
from engine.parallel.sharding import sharded_parameters
from engine.run.resolved import read_run_config
from experiments.sealed import Line, lines

MODEL, SERIES = "bert-336m", "twin of Megatron-336M, statements"
QUANTITIES = {
    "mnli": {"mnli_m": ("matched", "accuracy"), "mnli_mm": ("mismatched", "accuracy")},
    "qqp": {"qqp": ("dev", "accuracy")},
    "squad": {"squad11_f1": ("dev", "f1"), "squad11_em": ("dev", "exact_match")},
    "squad2": {"squad2_f1": ("dev", "f1"), "squad2_em": ("dev", "exact_match")},
    "race": {"race_m": ("middle", "accuracy"), "race_h": ("high", "accuracy")},
}
"""Held-out set and metric of each quantity, by task."""
TRAIN, HELD_OUT = 1024, 128
RECIPE = FineTuneRecipe(epochs=20, batch_size=32, learning_rate=1e-3)
THINGS = ("cat", "dog", "house", "river", "bird", "tree")
COLOURS = ("red", "blue", "green", "white", "black", "brown")


def measure_finetuning(recipe: FineTuneRecipe = RECIPE, train: int = TRAIN) -> list[Line]:
    """The held-out metrics of every task, in percent, after training on `train` examples of it."""
    measured: list[Line] = []
    with TemporaryDirectory() as folder:
        data = Path(folder)
        for task in TASKS:
            write_task(task, data / task, train)
        checkpoint = _initial_twin(data)
        for task, quantities in QUANTITIES.items():
            done = finetune(task, checkpoint, data / task, recipe)
            values = {name: done.metrics[split][metric] for name, (split, metric) in quantities.items()}
            note = f"{train} generated examples, {recipe.epochs} epochs, from initial weights"
            measured += lines(SERIES, values, "scaled", note=note)
    return measured


def write_task(task: str, folder: Path, train: int) -> None:
    """Write the task's files in their published formats; each set draws its own statements."""
    for place in (TASKS[task].train, *TASKS[task].held_out.values()):
        rng = random.Random(f"{task} {place}")
        count = train if place == TASKS[task].train else HELD_OUT
        path = folder / place / "1.txt" if task == "race" else folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(WRITERS[task](rng, count), encoding="utf-8")


def _statements(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Distinct things, each with a colour."""
    return list(zip(rng.sample(THINGS, count), rng.sample(COLOURS, count), strict=True))


def _say(statements: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"the {thing} is {colour}" for thing, colour in statements)


def _mnli(rng: random.Random, count: int) -> str:
    rows = ["sentence1\tsentence2\tgold_label"]
    for _ in range(count):
        first, second = _statements(rng, 2)
        label = rng.choice(("entailment", "contradiction", "neutral"))
        said = {"entailment": first, "contradiction": (first[0], f"not {first[1]}"), "neutral": second}[label]
        rows.append(f"{_say([first])}\t{_say([said])}\t{label}")
    return "\n".join(rows)


def _qqp(rng: random.Random, count: int) -> str:
    rows = ["question1\tquestion2\tis_duplicate"]
    for _ in range(count):
        (thing, _), (other, _) = _statements(rng, 2)
        same = rng.randrange(2)
        rows.append(f"what colour is the {thing} ?\twhich colour has the {thing if same else other} ?\t{same}")
    return "\n".join(rows)


def _squad(rng: random.Random, count: int, may_lack: bool = False) -> str:
    paragraphs = []
    for number in range(count):
        *known, (unknown, _) = _statements(rng, 4)
        context, (thing, colour) = _say(known), rng.choice(known)
        lacks = may_lack and rng.random() < 1 / 3
        answers = [] if lacks else [{"text": colour, "answer_start": context.index(colour)}]
        question = f"what colour is the {unknown if lacks else thing} ?"
        asked = {"id": str(number), "question": question, "answers": answers, "is_impossible": lacks}
        paragraphs.append({"context": context, "qas": [asked]})
    return json.dumps({"data": [{"title": "statements", "paragraphs": paragraphs}]})


def _race(rng: random.Random, count: int) -> str:
    passages = []
    for _ in range(count):
        ((thing, colour),) = known = _statements(rng, 1)
        options = rng.sample([each for each in COLOURS if each != colour], 3)
        right = rng.randrange(4)
        options.insert(right, colour)
        passages.append({"article": _say(known), "questions": [f"the {thing} is _"], "options": [options],
                         "answers": ["ABCD"[right]]})  # fmt: skip
    return "\n".join(map(json.dumps, passages))


WRITERS: dict[str, Callable[[random.Random, int], str]] = {
    "mnli": _mnli, "qqp": _qqp, "squad": _squad, "squad2": lambda rng, count: _squad(rng, count, True), "race": _race,
}  # fmt: skip


def _initial_twin(folder: Path) -> Path:
    """A checkpoint of the twin's initial weights, with a tokenizer of the tasks' texts."""
    config = read_run_config(MODEL, twin=True).model
    tokenizer = Tokenizer.train((path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.t*"))), 300)
    config = config.model_copy(update={"vocab_size": tokenizer.vocab_size, "padded_vocab_size": 384})
    model = BERT(config, serial_mesh())
    model.initialize(RECIPE.seed)
    tensors = {each.name: each.local.detach() for each in sharded_parameters(model, model.mesh)}
    checkpoint = folder / "twin"
    write_checkpoint(checkpoint, Imported("twin", config, tensors, tokenizer, {"format": "initial weights"}))
    return checkpoint
