"""A power cut: what was not synced is lost, cut short or has its former name, and nothing that was
finished is lost.

A small reproduction runs once, and before every change of a file the whole tree is noted, by inode.
From the notes and a seed follows a disk as a power cut at some point could leave it: of a file that
was written since its last sync the end or all is gone, and of a directory that was changed since
its last sync only the first few changes are there. On that disk every sealed run must verify, what
was complete when the last stage began must be there, and the same command must come to the same
end.

`python -m tests.chaos.power --seeds 500 --first 0` prints the seeds that are not survived; each can
be given again.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mlm_repro.lineage.digest import MARKER, check_seal, is_sealed
from mlm_repro.lineage.errors import UserError
from mlm_repro.lineage.run import MANIFEST
from mlm_repro.verify.recomputed import RunCheck
from tests.chaos.faults import Instrument
from tests.chaos.job import start_job, wait_for, warm_up, write_tiny
from tests.chaos.trials import TIMEOUT_SECONDS, outcome

OUTSIDE = "cache"
"""Folder of what can be made again, which is not watched."""
LIKELY = 0.5
"""Probability that of unsynced changes none is on the disk."""


class Entry(NamedTuple):
    """What a name in a directory stands for."""

    kind: str
    """file, folder or link"""
    number: int
    """The inode; of a link 0."""
    content: str = ""
    """Digest of a file's content; where a link leads."""


Tree = dict[str, Entry]
"""Everything below a folder, by path."""


class Moment(NamedTuple):
    """What is about to happen, to which path, and all that there is before it."""

    kind: str
    path: str
    tree: Tree


class Recorder(Instrument):
    """Notes, in a journal that several processes share, the tree before every change of it."""

    def __init__(self, folder: Path, journal: Path) -> None:
        super().__init__(folder, None)
        self.journal = journal
        self._read: dict[int, tuple[tuple[int, int], str]] = {}
        journal.mkdir(exist_ok=True)

    def begin(self, stage: str, rank: int = 0) -> None:
        super().begin(stage, rank)
        self.note("begin", stage)

    def touch(self, kind: Any, path: str | None, half: Callable[[], object] = lambda: None) -> None:
        super().touch(kind, path, half)
        if path is not None:
            self.note(kind, os.path.relpath(path, self.folder))

    def note(self, kind: str, path: str) -> None:
        """Write a moment into the journal."""
        line = json.dumps([kind, path, self._tree()]) + "\n"
        descriptor = os.open(
            self.journal / "moments.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        os.write(descriptor, line.encode())
        os.close(descriptor)

    def _tree(self) -> Tree:
        found: Tree = {}
        for folder, inner, files in os.walk(self.folder):
            inner[:] = [name for name in inner if name != OUTSIDE]
            for name in [*inner, *files]:
                path = os.path.join(folder, name)
                with suppress(FileNotFoundError):
                    found[os.path.relpath(path, self.folder)] = self._entry(path)
        return found

    def _entry(self, path: str) -> Entry:
        if os.path.islink(path):
            return Entry("link", 0, os.readlink(path))
        status = os.stat(path)
        if os.path.isdir(path):
            return Entry("folder", status.st_ino)
        mark = status.st_size, status.st_mtime_ns
        if self._read.get(status.st_ino, ("",))[0] != mark:
            data = Path(path).read_bytes()
            digest = sha256(data).hexdigest()
            self._read[status.st_ino] = mark, digest
            if not (self.journal / digest).exists():
                descriptor = os.open(self.journal / digest, os.O_WRONLY | os.O_CREAT, 0o600)
                os.write(descriptor, data)
                os.close(descriptor)
        return Entry("file", status.st_ino, self._read[status.st_ino][1])


class History:
    """All moments of a recorded run, in which an inode that is used again is another one."""

    def __init__(
        self, journal: Path, without: Callable[[Moment], bool] = lambda moment: False
    ) -> None:
        """Syncs for which `without` is true are taken for never made."""
        self.journal, self.without = journal, without
        with (journal / "moments.jsonl").open() as file:
            lines = [json.loads(line) for line in file]
        self.moments = [
            Moment(kind, path, {name: Entry(*entry) for name, entry in tree.items()})
            for kind, path, tree in lines
        ]
        self._tell_apart()

    def _tell_apart(self) -> None:
        given: dict[int, int] = {}
        last, count, is_moved = dict[int, set[str]](), 0, False
        for place, moment in enumerate(self.moments):
            now: dict[int, set[str]] = {}
            for name, entry in moment.tree.items():
                if entry.number:
                    now.setdefault(entry.number, set()).add(name)
            for number, names in now.items():
                if number not in last or not (names & last[number] or is_moved):
                    count += 1
                    given[number] = count
            tree = {
                name: entry._replace(number=given.get(entry.number, 0))
                for name, entry in moment.tree.items()
            }
            self.moments[place] = moment._replace(tree=tree)
            last, is_moved = now, moment.kind == "rename"

    def finished(self, cut: int) -> set[str]:
        """Names of the runs that were complete when the last stage before the cut began."""
        begun = [moment for moment in self.moments[: cut + 1] if moment.kind in ("begin", "end")]
        return (
            {
                name
                for name in begun[-1].tree
                if name.endswith(f"/{MARKER}") and name.count("/") == 2
            }
            if begun
            else set()
        )

    def lay(self, seed: int, folder: Path) -> int:
        """Make a disk in the folder as a power cut could leave it; returns the number of the moment
        of the cut."""
        draw = random.Random(seed)
        cut = draw.randrange(1, len(self.moments))
        disk = _Disk(self, cut, draw)
        disk.write(0, folder)
        return cut


class _Disk:
    """What is on the disk after a cut before the moment of that number."""

    def __init__(self, history: History, cut: int, draw: random.Random) -> None:
        self.journal, self.draw = history.journal, draw
        self.content: dict[int, str] = {}
        """Digest of each file's content, as programs saw it last."""
        self.synced = {
            each.number: each.content
            for each in history.moments[0].tree.values()
            if each.kind == "file"
        }
        """Digest of the content of each file that was synced; the user's own were there before."""
        self.versions: dict[int, list[dict[str, Entry]]] = {}
        """Entries of each folder since its last sync."""
        for number, moment in enumerate(history.moments[: cut + 1]):
            folders: dict[int, dict[str, Entry]] = {0: {}}
            numbers = {"": 0} | {
                name: each.number for name, each in moment.tree.items() if each.kind == "folder"
            }
            for name, entry in moment.tree.items():
                above, _, own = name.rpartition("/")
                if above in numbers:
                    folders.setdefault(numbers[above], {})[own] = entry
                if entry.kind == "file":
                    self.content[entry.number] = entry.content
            for folder in numbers.values():
                known = self.versions.setdefault(folder, [{}])
                if (entries := _names(folders.get(folder, {}))) != known[-1]:
                    known.append(entries)
            if moment.kind != "fsync" or number == cut or history.without(moment):
                continue
            if (entry := moment.tree.get(moment.path)) and entry.kind == "file":
                self.synced[entry.number] = entry.content
            elif entry:
                self.versions[entry.number] = self.versions[entry.number][-1:]
        self.versions[0] = self.versions[0][-1:]  # the folder of the user was there before

    def write(self, number: int, folder: Path) -> None:
        """Write what is left of a folder."""
        folder.mkdir(exist_ok=True)
        versions = self.versions.get(number, [{}])
        entries = versions[0 if self.draw.random() < LIKELY else self.draw.randrange(len(versions))]
        for name, entry in sorted(entries.items()):
            if entry.kind == "folder":
                self.write(entry.number, folder / name)
            elif entry.kind == "link":
                (folder / name).symlink_to(entry.content)
            else:
                (folder / name).write_bytes(self._left_of(entry.number))

    def _left_of(self, number: int) -> bytes:
        whole = (self.journal / self.content[number]).read_bytes()
        synced = (self.journal / self.synced[number]).read_bytes() if number in self.synced else b""
        if whole == synced:
            return whole
        if self.draw.random() < LIKELY:
            return synced
        least = len(synced) if whole.startswith(synced) else 0
        return whole[: self.draw.randint(least, len(whole))]


def _names(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Entries by name; what is written into a file is no change of its folder."""
    return {
        name: entry._replace(content="") if entry.kind == "file" else entry
        for name, entry in entries.items()
    }


def record(folder: Path, journal: Path, log: Path) -> dict[str, str]:
    """Run the reproduction in the folder, note every moment, and return digests of what it comes
    to."""
    write_tiny(folder)
    recorder = Recorder(folder, journal)
    (code,) = wait_for([start_job(folder, log, None, ranks=1, points=recorder)], TIMEOUT_SECONDS)
    if code:
        raise RuntimeError(f"the undisturbed run failed: {log.read_text()[-2000:]}")
    recorder.note("end", "")
    return _result(folder)


def _result(folder: Path) -> dict[str, str]:
    return {
        name: each
        for name, each in outcome(folder / "runs").items()
        if not name.startswith("table ")
    }


def lost(history: History, cut: int, place: Path) -> Iterator[str]:
    """What the disk lacks that was finished, and sealed runs on it that do not verify."""
    for marker in sorted(history.finished(cut)):
        if not (place / marker).is_file():
            yield f"{marker} is lost"
    for path in sorted((place / "runs").glob(f"*/{MARKER}")):
        if not path.parent.is_symlink():
            with suppress(FileNotFoundError):
                yield from sealed_wrongly(path.parent)


def sealed_wrongly(run: Path) -> list[str]:
    """What a check of a sealed run, and of those within, finds broken."""
    try:
        for marker in run.rglob(MARKER):
            if is_sealed(marker.parent):
                check_seal(marker.parent)
        return RunCheck(run).broken if (run / MANIFEST).is_file() else []
    except UserError as error:
        return [str(error)]


def survive(history: History, seed: int, work: Path, result: dict[str, str]) -> list[str]:
    """Why the cut of that seed is not survived; nothing if it is."""
    place, log = work / "place", work / "log"
    cut = history.lay(seed, place)
    with chdir(place):  # inputs are looked for in the current folder too
        failures = list(lost(history, cut, place))
    (code,) = wait_for([start_job(place, log, None, ranks=1)], TIMEOUT_SECONDS)
    if code:
        failures.append(f"the same command ended with {code}: {log.read_text()[-400:]}")
    else:
        try:
            came = _result(place)
            failures += [
                f"{name} is not as without the cut"
                for name in result
                if came.get(name) != result[name]
            ]
        except (UserError, OSError) as error:
            failures.append(f"what the same command comes to is not in order: {error}")
    moment = history.moments[cut]
    return [f"before {moment.kind} {moment.path}: {failure}" for failure in failures]


def main() -> int:
    """Entry point; exit code 1 if a seed was not survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.power", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    bad, screens = 0, (os.dup(1), os.dup(2))
    with tempfile.TemporaryDirectory(prefix="mlm-power-", ignore_cleanup_errors=True) as folder:
        work = Path(folder).resolve()
        # Each disk lies as deep as the recorded one: a page names its sources by relative paths.
        for name in ("warm", "recorded/place"):
            (work / name).mkdir(parents=True)
        write_tiny(work / "warm")
        try:
            warm_up(work / "warm")
        finally:
            for screen, number in zip(screens, (1, 2), strict=True):
                os.dup2(screen, number)
        result = record(work / "recorded" / "place", work / "journal", work / "log")
        history = History(work / "journal")
        for seed in range(asked.first, asked.first + asked.seeds):
            (here := work / f"seed-{seed}").mkdir()
            if failures := survive(history, seed, here, result):
                bad += 1
                print(f"seed {seed}: {'; '.join(failures)}", flush=True)
            shutil.rmtree(here)
        print(
            f"{asked.seeds - bad} of {asked.seeds} cuts survived, of {len(history.moments)}"
            " moments",
            flush=True,
        )
        os.chdir("/")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
