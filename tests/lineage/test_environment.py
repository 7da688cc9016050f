"""What a run ran on can be stored as JSON and is found without torch."""

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from mlm_repro.lineage import VERSION, environment

LIST_GPUS = """#!/bin/sh
echo "GPU-aa1, NVIDIA H200, 143771"
echo "GPU-bb2, Tesla, with a comma, 16384"
echo "[Not Found], [N/A]"
"""


def test_the_description_is_json_and_says_what_matters() -> None:
    found = environment.describe_environment().to_json()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["mlm_repro"] == VERSION
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["memory_bytes"] > 2**28
    assert {"numpy", "tokenizers"} <= found["packages"].keys()
    assert ("torch" in found["packages"]) == (find_spec("torch") is not None)


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["NVIDIA H200", "Tesla, with a comma"]),
        ("1,0", ["Tesla, with a comma", "NVIDIA H200"]),
        ("GPU-bb", ["Tesla, with a comma"]),
        ("0,7,1", ["NVIDIA H200"]),
        ("", []),
        ("-1", []),
    ],
)
def test_gpus_that_this_process_may_not_use_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, names: list[str]
) -> None:
    (tmp_path / "nvidia-smi").write_text(LIST_GPUS)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    memory = {"NVIDIA H200": 143771 * 2**20, "Tesla, with a comma": 16384 * 2**20}
    due = [{"name": name, "memory_bytes": memory[name]} for name in names]
    assert environment.list_gpus.__wrapped__() == due


def test_a_copy_of_the_files_says_which_commit_it_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "HOME", tmp_path)
    monkeypatch.setattr(environment, "wheel_state", dict)
    monkeypatch.delenv("MLM_COMMIT", raising=False)
    assert environment.source_state() == {}
    monkeypatch.setenv("MLM_COMMIT", "abc")
    assert environment.source_state() == {"commit": "abc", "dirty": None}


@pytest.mark.parametrize("script", [None, "#!/bin/sh\nexit 9\n"])
def test_no_driver_and_a_broken_driver_mean_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None
) -> None:
    if script:
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if script else str(tmp_path))
    assert environment.list_gpus.__wrapped__() == []


def test_the_commit_is_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLM_COMMIT", raising=False)
    root = Path(environment.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        assert environment.source_state() == {}
        return
    head = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    assert environment.source_state()["commit"] == (head.stdout.strip() or None)


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        (
            {"model name": "AMD EPYC", "cpu family": "25", "model": "17"},
            "AMD EPYC (family 25, model 17)",
        ),
        (
            {"CPU implementer": "0x41", "CPU part": "0xd4f"},
            "here (CPU implementer 0x41, CPU part 0xd4f)",
        ),
        ({}, "here"),
    ],
)
def test_processors_of_one_name_are_told_apart(
    facts: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_cpu_facts", lambda: facts)
    monkeypatch.setattr("platform.processor", lambda: "here")
    assert environment.cpu_name() == name


@pytest.mark.usefixtures("plain_git")
def test_the_state_of_a_clone_is_read_without_a_change_to_its_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git holds a lock while it writes the index, and a stop at that moment left the lock there:
    every later `git commit` of the user failed."""
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("a")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], check=True)
    os.utime(tmp_path / "file", (1, 1))  # git would note this time in its index
    index = (tmp_path / ".git" / "index").read_bytes()
    monkeypatch.setattr(environment, "HOME", tmp_path)
    assert environment.source_state()["dirty"] is False
    assert (tmp_path / ".git" / "index").read_bytes() == index
    subprocess.run([*git, "status", "--porcelain"], check=True)
    assert (tmp_path / ".git" / "index").read_bytes() != index
