"""After an upgrade a build says what differs, takes over what is the same, and leaves nothing that is not said."""

import json
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mlm_repro.data_pipeline.earlier import builds, leftovers
from mlm_repro.lineage.lock import locked
from tests.data_pipeline.builds import files_of
from tests.data_pipeline.conftest import sentences, write_jsonl, write_recipe
from tests.data_pipeline.copies import change, copy_of_library, copy_of_package, run, start


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", [sentences(40, seed) for seed in range(90)])
    write_recipe(tmp_path / "r.toml", "jsonl:a.jsonl", extra="shard_bytes = 65536\ndecontaminate.test_sets = []")
    return tmp_path


class Package:
    """A copy of the package, and its builds of a recipe."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, copy_of_package(folder / "copy")

    def edit(self, file: str, old: str, new: str) -> None:
        change(self.path / file, old, new)

    def run(self, *words: object, more: Path | None = None, ends: int = 0) -> str:
        places = [self.path / "sources", *([more] if more else [])]
        return run(*words, folder=self.folder, places=places, ends=ends)

    def killed_at(self, stage: str, *words: object) -> Path:
        """The directory of a build that is killed when it has finished tasks of a stage."""
        before = {*self.done(stage).values()}
        process = start("run", "r.toml", *words, folder=self.folder, places=[self.path / "sources"])
        end = time.monotonic() + 120
        while not (new := [path for path, when in self.done(stage).items() if when not in before]):
            assert time.monotonic() < end
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return new[0].parents[3]

    def done(self, stage: str) -> dict[Path, int]:
        """When each finished task of a stage in an unfinished build was done."""
        times = {}
        for path in self.folder.glob(f"runs/*/.work/{stage}/*/DONE"):
            with suppress(FileNotFoundError):  # its folder was taken over at this moment
                times[path] = path.stat().st_mtime_ns
        return times

    def runs(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("runs/small-*"))


@pytest.fixture
def package(folder: Path) -> Package:
    return Package(folder)


def kept(folder: Path, stage: str) -> dict[str, int]:
    """When each task of a stage on the shelf was done."""
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob(f"runs/.stages/small/{stage}/*/DONE")}


def test_an_upgrade_is_said_and_makes_anew_what_it_changes(folder: Path, package: Package, tmp_path: Path) -> None:
    package.run("run", "r.toml")
    (first,) = package.runs()
    package.edit("data_pipeline/reading/hub.py", "TEXT_PER_BYTE = 3", "TEXT_PER_BYTE = 3  # or so")
    package.edit("data_pipeline/stages/clean.py", '"""The repaired text."""', '"""The text, repaired."""')
    package.edit("data_pipeline/files.py", "the corpus is empty", "the corpus has nothing")
    said = package.run("run", "r.toml")
    assert f"already complete: runs/{first}" in said
    assert "note: " not in said

    prepared, measured = kept(folder, "prepare"), kept(folder, "measure")
    package.edit("data_pipeline/stages/length.py", "tokens >= self.min_tokens", "tokens > self.min_tokens - 1")
    digest = package.run("run", "r.toml", "--dry-run")
    said = package.run("run", "r.toml")
    notes = [
        f"note: the earlier build runs/{first} (complete) has the same settings and differs in the code of length\n",
        "note: taken from runs/.stages/small: source, clean, language; "
        "made anew: length, deduplicate, decontaminate, split, tokenize\n",
    ]
    assert all(note in said and note in digest for note in notes)
    assert kept(folder, "prepare") == prepared
    assert not set(kept(folder, "measure").values()) & set(measured.values())
    one, other = package.runs()
    assert files_of(folder / "runs" / one) == files_of(folder / "runs" / other)

    prepared = kept(folder, "prepare")
    package.edit("lineage/atomic.py", "json.loads(text, obj", "json.loads(text, parse_constant=None, obj")
    said = package.run("run", "r.toml")
    assert "differs in the code of source\n" in said
    assert "note: made anew: source, clean, language, length, dedup" in said
    assert not set(kept(folder, "prepare").values()) & set(prepared.values())

    prepared = kept(folder, "prepare")
    (copy_of_library("tokenizers", tmp_path / "one") / "tokenizers/more.py").write_text("more = 1\n")
    said = package.run("run", "r.toml", more=tmp_path / "one")
    assert " with other files (tokenizer)" in said
    assert kept(folder, "prepare") == prepared, "another library of tokens cleans nothing again"

    copy_of_library("ftfy", tmp_path / "two", "6.99.1")
    (tmp_path / "two/ftfy/more.py").write_text("more = 1\n")
    said = package.run("run", "r.toml", more=tmp_path / "two")
    assert "→ 6.99.1 (clean)" in said
    assert len(package.runs()) == 5
    assert len({str(files_of(folder / "runs" / name)) for name in package.runs()}) == 1


def test_unfinished_work_is_taken_over_and_its_directory_goes(folder: Path, package: Package) -> None:
    first = package.killed_at("measure")
    done = {path.parts[-2]: when for path, when in package.done("prepare").items()}
    package.edit("data_pipeline/passes/measure.py", "BATCH_CHARACTERS = 1 << 20", "BATCH_CHARACTERS = 1 << 21")
    second = package.killed_at("measure")
    assert second != first
    assert not first.exists()
    assert {path.parts[-2]: when for path, when in package.done("prepare").items()} == done
    package.edit("data_pipeline/passes/gather.py", "= 64 << 20", "= 32 << 20")
    said = package.run("run", "r.toml")
    assert (
        f"note: the earlier build runs/{second.name} (unfinished) has the same settings and differs in the code of"
        in said
    )
    assert f"taken from runs/{second.name}: source, clean, language, length, deduplicate, decontaminate; " in said
    assert "made anew: split, tokenize\n" in said
    assert not second.exists()
    package.run("run", "r.toml", "--runs", "fresh")
    assert files_of(folder / "runs/small") == files_of(folder / "fresh/small")


def test_a_build_that_is_refused_keeps_what_it_took_over(folder: Path, package: Package) -> None:
    package.killed_at("measure")
    done = {path.parts[-2]: when for path, when in package.done("prepare").items()}
    package.edit("data_pipeline/stages/length.py", "tokens >= self.min_tokens", "tokens > 10**9")
    said = package.run("run", "r.toml", ends=2)
    assert "error: nothing is left of the corpus after the length stage" in said
    assert package.runs() == []
    assert kept(folder, "prepare") == done
    package.edit("data_pipeline/stages/length.py", "tokens > 10**9", "tokens > self.min_tokens - 1")
    assert "note: taken from runs/.stages/small: source, clean, language; made anew: length" in package.run(
        "run", "r.toml"
    )
    assert kept(folder, "prepare") == done


def test_work_that_is_held_or_of_no_use_is_left_alone(folder: Path, package: Package) -> None:
    first = package.killed_at("measure")
    (folder / "runs/note.txt").write_text("mine")
    package.edit("data_pipeline/stages/length.py", "tokens >= self.min_tokens", "tokens > self.min_tokens - 1")
    with locked(first):
        said = package.run("run", "r.toml", "--set", "name=small")
        assert "is an unfinished build" not in said
    assert (first / ".work/prepare/00000/DONE").exists()
    package.edit("data_pipeline/stages/clean.py", "if fixed.strip() else", "if fixed.strip(None) else")
    said = package.run("run", "r.toml")
    assert f"note: runs/{first.name} is an unfinished build (" in said
    assert (first / ".work/prepare/00000/DONE").exists()


def test_a_trial_that_is_killed_leaves_the_shelf_as_it_was(folder: Path, package: Package) -> None:
    package.run("run", "r.toml")
    prepared = kept(folder, "prepare")
    package.edit("data_pipeline/stages/clean.py", "if fixed.strip() else", "if fixed.strip(None) else")
    trial = package.killed_at("prepare")
    package.edit("data_pipeline/stages/clean.py", "if fixed.strip(None) else", "if fixed.strip() else")
    package.edit("data_pipeline/stages/length.py", "tokens >= self.min_tokens", "tokens > self.min_tokens - 1")
    said = package.run("run", "r.toml")
    assert "note: taken from runs/.stages/small: source, clean, language; made anew: length" in said
    assert f"note: runs/{trial.name} is an unfinished build (" in said
    assert kept(folder, "prepare") == prepared
    (folder / "runs/.stages/small/harvest-wikipedia").mkdir()
    package.edit("data_pipeline/stages/clean.py", "if fixed.strip() else", 'if fixed.strip() != "" else')
    said = package.run("run", "r.toml")
    assert "note: taken from runs/.stages/small: downloads; made anew: source, clean" in said


def test_leftovers_are_listed_with_their_size_and_removed_where_nobody_works(folder: Path, package: Package) -> None:
    assert package.run("leftovers", ends=2).endswith("error: there is no folder of runs runs\n")
    package.run("run", "r.toml")
    assert package.run("leftovers") == "nothing is left of killed builds in runs\n"
    (whole,) = package.runs()
    (folder / "runs" / whole / ".work").mkdir()
    (folder / "runs" / whole / ".work/a").write_bytes(b"a" * 1000)
    killed = package.killed_at("prepare", "--set", "split.train=5")
    said = package.run("leftovers").splitlines()
    assert f"left: runs/{whole}/.work is the work of a complete build (1.0 kB)" in said
    assert [line for line in said if line.startswith(f"left: runs/{killed.name} is an unfinished build (")]
    assert len(said) == 2
    with locked(killed):
        assert (
            package.run("leftovers", "--remove")
            == f"removed: runs/{whole}/.work is the work of a complete build (1.0 kB)\n"
        )
        assert killed.exists()
    assert package.run("leftovers", "--remove").startswith(f"removed: runs/{killed.name} is")
    assert package.run("leftovers") == "nothing is left of killed builds in runs\n"
    assert package.runs() == [whole]
    assert not (folder / "runs" / whole / ".work").exists()
    assert (folder / "runs" / whole / "COMPLETE").exists()


def test_what_is_no_build_is_no_leftover(folder: Path) -> None:
    for name in ("small-1", "notes", "broken-2"):
        (folder / "runs" / name).mkdir(parents=True)
    (folder / "runs/broken-2/manifest.json").write_text("{")
    (folder / "runs/other-3").mkdir()
    (folder / "runs/other-3/manifest.json").write_text('{"name": "other", "kind": "training", "created": "2026"}')
    assert builds(folder / "runs") == []
    assert list(leftovers(folder / "runs")) == []


def test_a_build_of_the_first_release_is_said(folder: Path, package: Package) -> None:
    """Its manifest has another list of stages and one digest for all code."""
    package.run("run", "r.toml")
    (name,) = package.runs()
    path = folder / "runs" / name / "manifest.json"
    values = json.loads(path.read_text())
    values["config"] |= {"without": [], "prose": None}
    values["parents"] = {key: value for key, value in values["parents"].items() if key.startswith("source 0")}
    values["parents"]["code"] = "0" * 64
    del values["schema_version"], values["settings"]
    path.write_text(json.dumps(values))
    package.edit("data_pipeline/stages/length.py", "tokens >= self.min_tokens", "tokens > self.min_tokens - 1")
    said = package.run("run", "r.toml")
    assert (
        f"runs/{name} (complete) has the same settings and differs in code and libraries, which are not recorded"
        in said
    )
