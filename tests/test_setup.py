"""The set-up without what it needs: one sentence with the remedy, and the same command goes on."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.architecture.rooms import ROOT

ROOM = {"df": "echo; echo a b c 9000000"}
"""A set-up of nothing large is tried on a disk without 4 GB of room too."""


def with_programs(folder: Path, programs: dict[str, str]) -> str:
    """A PATH with scripts in `folder` in the place of some programs."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return f"{folder / 'bin'}:{os.environ['PATH']}"


def set_up(
    folder: Path, python: str, programs: dict[str, str], **more: str
) -> "subprocess.CompletedProcess[str]":
    """`install.sh` with an interpreter, scripts in the place of some programs, and `more`
    environment variables."""
    environment = (
        os.environ
        | {"PATH": with_programs(folder, programs), "PIP_INDEX_URL": "file:///nowhere"}
        | {"XDG_CACHE_HOME": str(folder / "cache")}
        | more
    )
    command = ["sh", "install.sh", python, str(folder / "venv"), "cuda"]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize(
    ("python", "programs", "words"),
    [
        ("python9", {}, "there is no python9 here; name a Python"),
        (
            "older",
            {"older": "exit 1"},
            "Python 3.11 or newer is needed; name one with: make setup PYTHON=",
        ),
        (sys.executable, {"df": "echo; echo a b c 1000"}, "needs 4 GB of disk: make room"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(
    tmp_path: Path, python: str, programs: dict[str, str], words: str
) -> None:
    done = set_up(tmp_path, python, programs)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert not (tmp_path / "venv").exists()


def test_without_a_network_the_remedy_is_the_last_line_and_an_old_environment_is_made_anew(
    tmp_path: Path,
) -> None:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").write_text("of another machine")
    done = set_up(tmp_path, sys.executable, ROOM)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("with PyPI in reach the same command goes on")
    space, step = done.stdout.splitlines()
    assert "3.6 GB" in space
    assert re.fullmatch(r"installing torch, its cuda build: about \d+ min left", step)
    found = subprocess.run(
        [tmp_path / "venv" / "bin" / "python", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout


def test_a_file_under_the_name_of_what_is_needed_is_not_installed(tmp_path: Path) -> None:
    pins = re.findall(
        r"^(\S+)==(\S+)", (ROOT / "constraints-cuda.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    for name, version in [("torch", "2.13.0"), *pins]:
        about = f"{name.replace('-', '_')}-{version}"
        with zipfile.ZipFile(tmp_path / f"{about}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "raise SystemExit('planted')")
            wheel.writestr(
                f"{about}.dist-info/METADATA",
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            )
            wheel.writestr(
                f"{about}.dist-info/WHEEL",
                "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            wheel.writestr(f"{about}.dist-info/RECORD", "")
    done = set_up(tmp_path, sys.executable, ROOM, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
    assert done.returncode == 2
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not list(tmp_path.rglob("torch.py"))


BACKEND = """
import zipfile
def build_editable(folder, *_):
    with zipfile.ZipFile(folder + "/own-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("own.py", "")
        wheel.writestr("own-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: own\\n"
                       "Version: 1\\n")
        wheel.writestr("own-1.dist-info/WHEEL", "Wheel-Version: 1.0\\n"
                       "Root-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("own-1.dist-info/RECORD", "")
    return "own-1-py3-none-any.whl"
"""


def test_a_second_clone_shares_the_files_of_the_first_and_installs_nothing_again(
    tmp_path: Path,
) -> None:
    wheel = tmp_path / "needed-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("needed.py", "def main(): print(__file__)")
        file.writestr(
            "needed-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: needed\nVersion: 1\n"
        )
        file.writestr(
            "needed-1.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr(
            "needed-1.dist-info/entry_points.txt", "[console_scripts]\nneeded = needed:main\n"
        )
        file.writestr("needed-1.dist-info/RECORD", "")
    pin = f"needed==1 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
    environment = os.environ | {
        "PATH": with_programs(tmp_path, ROOM),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PIP_NO_INDEX": "1",
    }

    def clone(name: str, more: str = "") -> tuple[Path, str]:
        folder = tmp_path / name
        if not folder.exists():
            folder.mkdir()
            shutil.copy(ROOT / "install.sh", folder)
            (folder / "constraints.txt").write_text(pin)
            (folder / "backend.py").write_text(BACKEND)
            (folder / "pyproject.toml").write_text(
                '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            )
        (folder / "constraints-cuda.txt").write_text(pin + more)
        command = ["sh", "install.sh", sys.executable, ".venv", "cuda"]
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment | {"PIP_FIND_LINKS": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        (folder / ".venv" / ".ready").touch()
        return folder / ".venv", done.stdout

    # The program's own caches lie beside it.
    stored = tmp_path / "cache" / "mlm-repro" / "scores" / "of-a-model"
    stored.parent.mkdir(parents=True)
    stored.touch()
    first, told = clone("first")
    assert "other packages" in told
    wheel.rename(tmp_path / "gone")  # nothing can be installed from now on
    second, told = clone("second")
    assert "other packages" not in told
    assert str(tmp_path / "cache") in told
    assert stored.exists()
    for venv in (first, second):
        run = subprocess.run([venv / "bin" / "needed"], capture_output=True, text=True, check=True)
        (module,) = venv.glob("lib/*/site-packages/needed.py")
        assert run.stdout == f"{module}\n"
        assert not module.stat().st_mode & 0o222  # a clone cannot change another's
        assert (
            subprocess.run([venv / "bin" / "python", "-c", "import own"], check=False).returncode
            == 0
        )
    assert (
        len(
            {
                next(venv.glob("lib/*/site-packages/needed.py")).stat().st_ino
                for venv in (first, second)
            }
        )
        == 1
    )
    (next(second.glob("lib/*/site-packages")) / "users.py").touch()
    (tmp_path / "gone").rename(wheel)
    clone("second", "# other pins\n")
    assert list(second.glob("lib/*/site-packages/users.py"))


def test_what_is_fetched_is_named_by_its_digest() -> None:
    pinned = set()
    for path in ROOT.glob("constraints*.txt"):
        for entry in re.split(r"\n(?! )", path.read_text(encoding="utf-8").rstrip()):
            assert re.fullmatch(r"\S+==\S+( ; .+)?( \\\n    --hash=sha256:[0-9a-f]{64})+", entry), (
                entry[:200]
            )
            pinned.add(re.sub(r"[-_.]+", "-", entry.partition("==")[0]).lower())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    of_ours = Requirement(extras["test"][0]).extras
    asked = sum((extras[name] for name in of_ours), [*project["dependencies"], *extras["test"][1:]])
    assert {re.sub(r"[-_.]+", "-", Requirement(text).name).lower() for text in asked} <= pinned
    others = [
        ROOT / "Dockerfile",
        ROOT / "apptainer.def",
        *(ROOT / ".github" / "workflows").iterdir(),
    ]
    text = "\n".join(path.read_text(encoding="utf-8") for path in others)
    fetched = re.findall(r"(?:^From:|^FROM|uses:) (\S+)", text, re.MULTILINE)
    assert len(fetched) > 6
    assert [
        name for name in fetched if not re.search(r"@(sha256:[0-9a-f]{64}|[0-9a-f]{40})$", name)
    ] == []


def test_the_wheel_is_built_by_pinned_tools_and_is_attested() -> None:
    """Build isolation would fetch the newest setuptools, without a digest."""
    ci = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    builds = [line for line in ci.splitlines() if "-m build" in line]
    assert len(builds) == 1
    assert all("--no-isolation" in line for line in builds)
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"][
        "requires"
    ]
    pinned = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("constraints*.txt"))
    for text in [*needed, "build"]:
        requirement = Requirement(text)
        (number,) = {*re.findall(rf"^{requirement.name}==(\S+)", pinned, re.MULTILINE)}
        assert requirement.specifier.contains(number)
    assert (
        ci.index("-m build")
        < ci.index("--bill")
        < ci.index("attest-build-provenance")
        < ci.index("upload-artifact")
    )


def test_pins_are_renewed_and_held_against_known_holes() -> None:
    renewed = (ROOT / ".github" / "dependabot.yml").read_text(encoding="utf-8")
    assert {*re.findall(r"package-ecosystem: (\S+)", renewed)} == {
        "pip",
        "github-actions",
        "docker",
    }
    job = (ROOT / ".github" / "workflows" / "pins.yml").read_text(encoding="utf-8")
    (command,) = re.findall(r"run: (sed .+)>pins.txt", job)
    done = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    listed = done.stdout.splitlines()
    files = re.findall(r"constraints\S*", command)
    pins = [
        re.findall(r"^[\w.-]+==", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        for name in files
    ]
    assert len(listed) == sum(map(len, pins)) > 0
    assert [line for line in listed if not re.fullmatch(r"\S+==[\w.]+( ; .+)?", line)] == []
    assert "pip-audit@" in job


def test_no_job_leaves_its_token_in_the_checkout_or_may_write_without_saying_so() -> None:
    jobs = list((ROOT / ".github" / "workflows").glob("*.yml"))
    assert len(jobs) >= 3
    checkouts = 0
    for path in jobs:
        text = path.read_text(encoding="utf-8")
        assert re.search(r"^permissions:\n  contents: read$", text, re.MULTILINE), path
        for step in re.split(r"^ +- ", text, flags=re.MULTILINE):
            if "actions/checkout@" in step:
                checkouts += 1
                assert re.search(r"^ +persist-credentials: false$", step, re.MULTILINE), path
    assert checkouts >= len(jobs)


@pytest.mark.usefixtures("plain_git")
def test_a_container_has_what_git_tracks_and_does_not_run_as_root(tmp_path: Path) -> None:
    *_, last = re.split(
        r"^FROM ", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    copied = re.findall(r"^COPY .*", last, re.MULTILINE)
    assert copied == ["COPY --from=tracked --chown=mlm /mlm-repro /mlm-repro"]
    assert last.index("USER mlm") < last.index("make setup")
    assert "USER root" not in last
    whole = (
        (ROOT / "Dockerfile").read_text(encoding="utf-8"),
        (ROOT / "apptainer.def").read_text(encoding="utf-8"),
    )
    (clone,) = {re.search(r"git clone ([-\w ]+) \S+ \S+", text)[1] for text in whole}  # type: ignore[index]
    source = tmp_path / "clone"
    source.mkdir()
    for command in (["init", "-q"], ["config", "http.extraHeader", "secret"]):
        subprocess.run(["git", *command], cwd=source, check=True)
    (source / "README.md").write_text("tracked")
    subprocess.run(["git", "add", "README.md"], cwd=source, check=True)
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *who, "commit", "-q", "-m", "first"], cwd=source, check=True)
    (source / ".netrc").write_text("secret")
    subprocess.run(["git", "clone", *clone.split(), source, tmp_path / "image"], check=True)
    held = [path for path in (tmp_path / "image").rglob("*") if path.is_file()]
    assert {path.name for path in (tmp_path / "image").iterdir()} == {".git", "README.md"}
    assert not [path for path in held if b"secret" in path.read_bytes()]
