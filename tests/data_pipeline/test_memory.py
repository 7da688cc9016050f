"""A corpus several times larger takes hardly more memory: nothing holds all texts."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

from tests.data_pipeline.conftest import WORDS

BUILD = """
import sys
from pathlib import Path
from mlm_repro.data_pipeline import pipeline
from tests.data_pipeline.builds import build, config_for
pipeline.SLICE_BYTES = 1 << 20
folder = Path(sys.argv[1])
build(folder, config_for(f"jsonl:{folder / sys.argv[2]}", "shard_bytes=1048576", "decontaminate.test_sets=[]"), sys.argv[2] + "-runs")
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""  # noqa: E501


def write_corpus(path: Path, total_bytes: int) -> Path:
    rng = random.Random(3)
    written = 0
    with path.open("w") as file:
        while written < total_bytes:
            text = re.sub(r"((?:\w+ ){11}\w+) ", r"\1. ", " ".join(rng.choices(WORDS, k=400)))
            written += file.write(json.dumps({"text": text}) + "\n")
    return path


def peak_bytes(folder: Path, name: str) -> int:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", BUILD, str(folder), name]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, check=True)
    return int(done.stdout.splitlines()[-1]) * 1024


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    small, large = 2_000_000, 14_000_000
    peak_bytes(tmp_path, write_corpus(tmp_path / "tiny.jsonl", 200_000).name)  # compiles what is not compiled yet
    write_corpus(tmp_path / "small.jsonl", small)
    write_corpus(tmp_path / "large.jsonl", large)
    grown = peak_bytes(tmp_path, "large.jsonl") - peak_bytes(tmp_path, "small.jsonl")
    print(f"{(large - small) / 1e6:.0f} MB more text took {grown / 1e6:.1f} MB more memory")
    assert grown < (large - small) / 2
