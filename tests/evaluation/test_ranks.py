"""A model of transformers on data-parallel ranks: their number changes no byte, and the end of one
ends all."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.evaluation.scoring import scores
from mlm_repro.evaluation.scoring.store import BYTES_PER_TOKEN, HEADER
from tests.commands import call
from tests.evaluation.test_pretrained import TEXT, made

pytest.importorskip("transformers")
TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "--no-python",
)
ASKED = ("--window", 16, "--stride", 4, "--set", "batch_size=4")


@pytest.fixture
def asked(tmp_path: Path) -> list[object]:
    """The verb and what follows it, for a model with a first token and with rows that stand for no
    sub-word."""
    (tmp_path / "text.txt").write_text(TEXT)
    return [
        "perplexity",
        tmp_path / "text.txt",
        "--ckpt",
        made(tmp_path / "model", "LlamaConfig", rows=3),
        *ASKED,
    ]


def files(folder: Path) -> list[object]:
    """Words that write the record and every window into a folder."""
    return ["--json", folder / "result.json", "--samples", folder / "samples.jsonl"]


def written(folder: Path) -> tuple[dict[str, Any], bytes, dict[str, list[bytes]]]:
    """The record without the call's time, command and threads; the windows; the stored scores,
    batch by batch."""
    record = json.loads((folder / "result.json").read_text())
    del record["seconds"], record["environment"]["argv"], record["environment"]["variables"]
    stored: dict[str, list[bytes]] = {}
    for path in folder.glob("**/*.scores"):
        content = path.read_bytes()
        while content:
            end = HEADER.size + BYTES_PER_TOKEN * HEADER.unpack_from(content)[1]
            stored.setdefault(path.parent.name, []).append(content[:end])
            content = content[end:]
    return (
        record,
        (folder / "samples.jsonl").read_bytes(),
        {name: sorted(each) for name, each in stored.items()},
    )


def die_in_rank_one() -> None:
    """Have rank 1 of the command end itself at its second batch."""
    plain, batches = scores.score_in_memory, []

    def score_or_die(*given: Any) -> Any:
        batches.extend([given] * (len(given[1]) == 4))  # a probe has at most three rows
        if os.environ.get("RANK") == "1" and len(batches) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*given)

    scores.score_in_memory = score_or_die


def add_to_import_path(folder: Path) -> None:
    """Import from a folder with a package too, as setuptools does once it is imported."""
    (folder / "vendored-1.0.dist-info").mkdir(parents=True)
    sys.path.append(str(folder))


def test_two_ranks_give_the_bytes_of_one(tmp_path: Path, asked: list[object]) -> None:
    def own(name: str) -> dict[str, str]:
        (tmp_path / name).mkdir()
        return {"XDG_CACHE_HOME": str(tmp_path / name), "OMP_NUM_THREADS": "1"}

    more = partial(add_to_import_path, tmp_path / "vendored")
    done = [
        call(
            own("one"),
            "mlm-eval",
            *asked,
            "--set",
            "workers=1",
            *files(tmp_path / "one"),
            ends=0,
            prepare=more,
        ),
        call(
            own("two"), "mlm-eval", *asked, "--set", "layout=dp=2", *files(tmp_path / "two"), ends=0
        ),
    ]
    assert [each.out.count("perplexity") for each in done] == [done[0].out.count("perplexity")] * 2
    command = [
        *TORCHRUN,
        Path(sys.executable).with_name("mlm-eval"),
        *asked,
        *files(tmp_path / "torchrun"),
    ]
    environment = os.environ | own("torchrun")
    ran = subprocess.run(
        [*map(str, command)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    one, two, under_torchrun = (written(tmp_path / name) for name in ("one", "two", "torchrun"))
    assert two == one
    assert under_torchrun == one
    assert len(next(iter(one[2].values()))) == 17
    files_of_two = list((tmp_path / "two").glob("**/*.scores"))
    assert len(files_of_two) == 2, "each rank kept its own"


def test_the_end_of_one_rank_ends_all_with_a_clear_code(
    tmp_path: Path, asked: list[object]
) -> None:
    own, words = (
        {"XDG_CACHE_HOME": str(tmp_path)},
        [*asked, "--set", "layout=dp=2", *files(tmp_path)],
    )
    done = call(own, "mlm-eval", *words, ends=7, prepare=die_in_rank_one)
    assert (
        done.error
        == "error: rank 1 was ended by SIGKILL; the same command continues from what was finished"
    )
    assert not (tmp_path / "result.json").exists()
    assert len(list(tmp_path.glob("**/*.scores"))) == 2
    call(own, "mlm-eval", *words, ends=0)
    after_a_kill = written(tmp_path)
    assert sum(map(len, after_a_kill[2].values())) == 17, "what was kept is not scored again"
    program = tmp_path / "program.py"
    program.write_text(
        "from mlm_repro.evaluation.cli import main\nfrom tests.evaluation.test_ranks import"
        " die_in_rank_one\nif __name__ == '__main__':\n    die_in_rank_one()\n    main()\n"
    )
    command = [*TORCHRUN[:-1], program, *asked]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "other"), "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [*map(str, command)],
        env=environment | {"PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 1, ran.stderr
    said = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, ran.stderr
    assert said[0].endswith("the same command continues from what was finished")
    assert "perplexity" not in ran.stdout


def test_ranks_that_divide_a_model_of_transformers_are_refused(
    tmp_path: Path, asked: list[object]
) -> None:
    refused = call({}, "mlm-eval", *asked, "--set", "layout=tp=2", ends=2)
    assert (
        refused.err.count("is computed by transformers, which takes no tp, pp, vocab or heads") == 1
    )
