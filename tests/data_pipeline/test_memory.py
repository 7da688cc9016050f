"""A corpus several times larger takes hardly more memory: nothing holds all texts."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

from mlm_repro.data_pipeline.runner import DOCUMENT_BYTES
from tests.data_pipeline.conftest import WORDS

BUILD = """
import sys
from pathlib import Path
from mlm_repro.data_pipeline.passes import gather
from tests.data_pipeline.builds import build, config_for
gather.SLICE_BYTES = 1 << 20
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


def peak_bytes(folder: Path, name: str, program: str = BUILD) -> int:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", program, str(folder), name]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=600, check=True
    )
    return int(done.stdout.splitlines()[-1]) * 1024


DEDUPLICATE = """
import sys
from pathlib import Path
from mlm_repro.data_pipeline.config import DeduplicateConfig
from mlm_repro.data_pipeline.cli import _one_source
from mlm_repro.data_pipeline.runner import run_stage
source = "jsonl:" + sys.argv[1] + "/" + sys.argv[2]
run_stage(DeduplicateConfig, _one_source(source, ["deduplicate"]).model_copy(update={"workers": 1}), Path(source[6:] + "-out"))
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""  # noqa: E501


def test_a_document_takes_no_more_memory_if_it_is_a_duplicate(tmp_path: Path) -> None:
    """Lines of which half are equal, an error page of a crawl: at most DOCUMENT_BYTES for each, on
    all tasks."""
    rng = random.Random(5)

    def write(name: str, count: int) -> str:
        with (tmp_path / name).open("w") as file:
            for number in range(count):
                words = (
                    ["page", "not", "found"]
                    if number % 2
                    else [f"{rng.randrange(10**6):x}" for _ in range(7)]
                )
                file.write(json.dumps({"text": " ".join(words)}) + "\n")
        return name

    write("tiny", 2_000)
    peak_bytes(tmp_path, "tiny", DEDUPLICATE)  # compiles what is not compiled yet
    few, many = 60_000, 460_000
    before = peak_bytes(tmp_path, write("few", few), DEDUPLICATE)
    grown = peak_bytes(tmp_path, write("many", many), DEDUPLICATE) - before
    print(
        f"{many - few:,} documents, half of them equal, took {grown / (many - few):.0f} bytes each"
    )
    assert grown < DOCUMENT_BYTES * (many - few)


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    small, large = 2_000_000, 14_000_000
    # Compiles what is not compiled yet.
    peak_bytes(tmp_path, write_corpus(tmp_path / "tiny.jsonl", 200_000).name)
    write_corpus(tmp_path / "small.jsonl", small)
    write_corpus(tmp_path / "large.jsonl", large)
    grown = peak_bytes(tmp_path, "large.jsonl") - peak_bytes(tmp_path, "small.jsonl")
    print(f"{(large - small) / 1e6:.0f} MB more text took {grown / 1e6:.1f} MB more memory")
    assert grown < (large - small) / 2
