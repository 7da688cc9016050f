"""Compares this tree with another on one machine, bit for bit: `python -m tests.golden OUT.json
[--beside OLD.json]`.

Runs the smallest reproduction in a folder of its own; floating-point results are those of this
processor alone.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.golden.digests import of_commands, of_kept, of_reproduction


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--beside", type=Path, metavar="OLD")
    arguments = parser.parse_args()
    programs = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "HOME": name, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment.pop("MLM_DATA_DIR", None)
        subprocess.run(
            [programs / "mlm-experiment", "reproduce", "8.3b", "--smoke"],
            cwd=folder,
            env=environment,
            check=True,
        )
        digests = {**of_reproduction(folder / "runs"), **of_commands(programs, folder), **of_kept()}
    arguments.out.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")
    if arguments.beside:
        before = json.loads(arguments.beside.read_text())
        for name in sorted({*before, *digests}):
            if before.get(name) != digests.get(name):
                state = (
                    "gone" if name not in digests else "new" if name not in before else "changed"
                )
                print(f"{state}: {name}")
        print(
            f"{sum(before.get(name) == value for name, value in digests.items())} of {len(before)}"
            " digests are equal"
        )


if __name__ == "__main__":
    main()
