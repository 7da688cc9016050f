"""The oracle: two small checkpoints and texts on which every convention gives another number.

One is a GPT-2. The other, in `llama`, is a Mistral with a window, an output layer of its own with
padded rows, and a tokenizer that puts a token before every text and reads a literal `<unk>` as one.
Their files are kept and copied, so every machine writes the same bytes. `python -m
tests.evaluation.oracle_search` in the repository made them, and a test repeats it: weights are
whole multiples of 2^-13 from SHAKE-256 of the first seed by which all conventions lie apart.
"""

import csv
import shutil
from pathlib import Path

from mlm_repro.evaluation.conventions.table import GPT2, LLAMA, Convention
from mlm_repro.lineage.digest import seal, sealed_files, sha256_file
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.lock import new_output

FILES = Path(__file__).parent / "oracle_files"
TEXTS = "texts"
SECOND = "llama"


def write_oracle(out: Path) -> None:
    """Write the new directory `out`: two checkpoints, texts, tasks for lm-evaluation-harness,
    tables and instructions, all copied from files of this package. Both checkpoints, `out` itself
    and its folder `llama`, are sealed. Raises BadInput if `out` exists or cannot be written."""
    with new_output(out) as directory:
        shutil.copytree(
            FILES, directory, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
        )
        shutil.copytree(directory / TEXTS, directory / SECOND / TEXTS)
        for checkpoint in (directory / SECOND, directory):
            seal(checkpoint)


def read_table(directory: Path) -> list[Convention]:
    """Return a list of a Convention for each row of the file `table.csv` of `directory`, which is
    one of an oracle's two checkpoints. The row gives the convention's axes and its number on each
    text that it has one for, by the text's name; the convention's assumed frequency is computed
    from its axes. Raises BadInput if a sealed file of the directory was changed or removed, since
    that changes numbers, and IntegrityFailure if the directory has no readable seal."""
    for name, entry in sealed_files(directory).items():
        if not (directory / name).is_file() or sha256_file(directory / name) != entry["sha256"]:
            raise BadInput(
                f"{directory / name} is not as it was written: write the oracle to a new directory"
                " by --out and run the harness on that"
            )
    with (directory / "table.csv").open(encoding="utf-8", newline="") as file:
        rows = [
            {name: value for name, value in row.items() if value} for row in csv.DictReader(file)
        ]
    texts = {path.stem for path in (directory / TEXTS).iterdir()}
    usage = LLAMA if "softmax" in rows[0] else GPT2
    axes_and_values = [
        (
            {k: v for k, v in row.items() if k not in texts},
            {k: float(row[k]) for k in row.keys() & texts},
        )
        for row in rows
    ]
    return [Convention(axes, values, usage.weight(axes)) for axes, values in axes_and_values]
