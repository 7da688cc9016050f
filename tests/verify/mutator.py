"""Edits that a forger could make, of every file and key of a folder of runs: each is sealed anew,
and verified.

`python -m tests.verify.mutator FOLDER --count 2000 --seed 1` prints the edits that nothing names.
FOLDER has honest runs.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from mlm_repro.lineage.chain import CHECKPOINTS
from mlm_repro.lineage.digest import MARKER, is_sealed, seal
from mlm_repro.lineage.errors import UserError
from mlm_repro.lineage.kinds import ALWAYS_FREE
from mlm_repro.verify.recomputed import KINDS, RunCheck

WIDE = str.maketrans("0123456789", "０１２３４５６７８９")
LINES = (0, 1, -1)
"""Lines of a file of lines that are edited."""
OF_FILES = ("delete", "duplicate", "link", "rename", "look-alike", "swap", "empty", "cut", "plant")
OF_LINES = ("repeat line", "drop line", "turn lines")
OF_KEYS = (
    "delete key",
    "add key",
    "repeat key",
    "look-alike key",
    "scale",
    "null",
    "text",
    "endless",
    "exchange",
)
NAMED_ANYWHERE = ("duplicate", "link", "rename", "look-alike", "plant", "repeat key")
"""Edits that no file is free to have."""


class Edit(NamedTuple):
    """One edit of a file of a run."""

    kind: str
    file: str
    key: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.file} {'.'.join(map(str, self.key))}".strip()


def edits(run: Path) -> Iterator[Edit]:
    """Every edit of every file and key of a run, but of its seals and of its page, which is made
    again."""
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run).as_posix()
        if path.is_dir() or name == MARKER or name.startswith("report/") or "/." in f"/{name}":
            continue
        yield from (Edit(kind, name) for kind in OF_FILES)
        if path.name == MARKER:
            continue
        if path.suffix == ".jsonl":
            yield from (Edit(kind, name) for kind in OF_LINES)
        if path.suffix not in (".json", ".jsonl"):
            yield Edit("scale", name)
            continue
        for key in _keys(path):
            yield from (Edit(kind, name, key) for kind in OF_KEYS)


def _keys(path: Path) -> Iterator[tuple[Any, ...]]:
    """Places of values in a JSON file; of a list the first and the last."""

    def below(value: Any, key: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if isinstance(value, dict):
            for name, inner in value.items():
                yield (*key, name)
                yield from below(inner, (*key, name))
        elif isinstance(value, list) and value:
            for number in dict.fromkeys((0, len(value) - 1)):
                yield from below(value[number], (*key, number))

    values = _read(path)
    if path.suffix == ".jsonl":
        for number in dict.fromkeys(each % len(values) for each in LINES) if values else ():
            yield from below(values[number], (number,))
    else:
        yield from below(values, ())


def _read(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return (
        [json.loads(line) for line in text.splitlines()]
        if path.suffix == ".jsonl"
        else json.loads(text)
    )


def _write(path: Path, values: Any, raw: tuple[str, str] | None = None) -> None:
    text = (
        "".join(json.dumps(line) + "\n" for line in values)
        if path.suffix == ".jsonl"
        else json.dumps(values)
    )
    path.write_text(text.replace(*raw, 1) if raw else text, encoding="utf-8")


def apply(edit: Edit, run: Path) -> bool:
    """Make the edit; False if it changes nothing."""
    path, before = run / edit.file, (run / edit.file).read_bytes()
    if edit.key:
        return _apply_key(edit, path) and path.read_bytes() != before
    beside = sorted(
        each for each in path.parent.iterdir() if each.is_file() and each.suffix == path.suffix
    )
    other = beside[(beside.index(path) + 1) % len(beside)]
    match edit.kind:
        case "delete":
            path.unlink()
        case "duplicate":
            shutil.copyfile(path, path.with_name(f"{path.stem}1{path.suffix}"))
        case "link":
            hidden = run.parent / "elsewhere"
            shutil.copyfile(path, hidden)
            path.unlink()
            path.symlink_to(hidden)
        case "rename":
            path.rename(path.with_name(f"{path.stem}2{path.suffix}"))
        case "look-alike":
            wide = (
                path.name.translate(WIDE)
                if path.name.translate(WIDE) != path.name
                else path.name.replace("a", "а")
            )
            if wide == path.name:
                return False
            path.rename(path.with_name(wide))
        case "empty" | "cut":
            if not before or path.name == MARKER:  # which is written anew
                return False
            path.write_bytes(before[: len(before) // 2] if edit.kind == "cut" else b"")
        case "plant":
            planted = path.parent / f"{path.stem}-notes"
            planted.mkdir()
            shutil.copyfile(path, planted / path.name)
        case "repeat line" | "drop line" | "turn lines":
            lines = before.splitlines(keepends=True)
            if not lines:
                return False
            new = {
                "repeat line": [*lines, lines[-1]],
                "drop line": lines[:-1],
                "turn lines": lines[::-1],
            }[edit.kind]
            path.write_bytes(b"".join(new))
            return new != lines
        case "swap":
            if other == path or other.read_bytes() == before:
                return False
            content = other.read_bytes()
            other.write_bytes(before)
            path.write_bytes(content)
        case "scale":
            if not before:
                return False
            at = len(before) * 3 // 4
            path.write_bytes(before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
    return True


def _apply_key(edit: Edit, path: Path) -> bool:
    values = _read(path)
    *above, last = edit.key
    place = values
    for step in above:
        place = place[step]
    value = place[last]
    mark = json.dumps({"mark": "mark"})[1:-1]
    raw = None
    match edit.kind:
        case "delete key":
            if not value:  # as good as absent, which the command says too
                return False
            del place[last]
        case "add key":
            if not isinstance(value, dict):
                return False
            value["added"] = 1
        case "repeat key":
            place["mark"] = "mark"
            raw = (mark, f"{json.dumps(last)}: {json.dumps(_scaled(value))}")
        case "look-alike key":
            if "a" not in str(last):
                return False
            place[str(last).replace("a", "а", 1)] = place.pop(last)
        case "scale" | "null" | "text" | "endless":
            new = {
                "scale": _scaled(value),
                "null": None,
                "text": str(value),
                "endless": float("inf"),
            }[edit.kind]
            if (
                new == value
                or (edit.kind != "scale" and isinstance(value, dict | list))
                or (not value and not new)
            ):
                return False
            place[last] = new
        case "exchange":
            others = list(place) if isinstance(place, dict) else list(range(len(place)))
            other = others[(others.index(last) + 1) % len(others)]
            if place[other] == value or type(place[other]) is not type(value):
                return False
            place[last], place[other] = place[other], value
    _write(path, values, raw)
    return True


def _scaled(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if isinstance(value, int) else value * 1.5 + (value == 0)
    if isinstance(value, str):
        return value[:-1] + ("0" if value[-1:] != "0" else "1")
    if isinstance(value, list):
        return [_scaled(value[0]), *value[1:]] if value else [1]
    return value  # of an object each key is drawn by itself


def reseal(folder: Path, order: list[str]) -> None:
    """Seal what lies inside, then the runs in the order in which they were made."""
    for name in order:
        run = folder / name
        for inner in sorted(
            {marker.parent for marker in run.rglob(MARKER)} | {*(run / CHECKPOINTS).glob("*")}
        ):
            if (
                inner != run
                and inner.is_dir()
                and not inner.is_symlink()
                and inner.name != "report"
            ):
                with suppress(UserError, OSError):
                    seal(inner)
        with suppress(UserError, OSError):
            seal(run)


def said_of(run: Path) -> set[str]:
    """What the verification of the run alone, without what was made of it, says against it."""
    try:
        check = RunCheck(run)
    except (UserError, OSError, ValueError, KeyError) as error:
        return {str(error)}
    return {*check.broken, *check.absent}


def is_said_to_be_free(run: Path, edit: Edit) -> bool:
    """True for a value or the content of a file that, as `mlm-verify run` prints, nothing
    contradicts."""
    if edit.kind in NAMED_ANYWHERE:
        return False
    kind = KINDS[json.loads((run / "manifest.json").read_text())["kind"]]
    named = f"{edit.file} {'.'.join(map(str, edit.key))}".strip()
    return any(fnmatch(named, f"{pattern}*") for pattern in (*ALWAYS_FREE, *kind.free))


def survivors(
    folder: Path,
    order: list[str],
    count: int,
    seed: int,
    publish: Callable[[Path], object] | None = None,
) -> tuple[int, list[str]]:
    """Make `count` edits, drawn by seed, each in a copy of the folder; how many were made, and
    those nothing named."""
    every = [(name, edit) for name in order for edit in edits(folder / name)]
    drawn = random.Random(seed).sample(every, min(count, len(every)))
    alive, made = list[str](), 0
    honest = {name: said_of(folder / name) for name in order}
    for name, edit in drawn:
        if is_said_to_be_free(folder / name, edit):
            continue
        with tempfile.TemporaryDirectory() as place:
            copy = Path(shutil.copytree(folder, Path(place) / "runs", symlinks=True))
            if not apply(edit, copy / name):
                continue
            made += 1
            reseal(copy, order)
            if publish:
                with suppress(
                    UserError, OSError, ValueError, KeyError, LookupError, TypeError, AttributeError
                ):
                    publish(copy)
            if not said_of(copy / name) - honest[name]:
                alive.append(f"{name}: {edit}")
    return made, alive


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    runs = [
        run.name
        for run in sorted(asked.folder.iterdir())
        if is_sealed(run) and not run.is_symlink()
    ]
    order = sorted(
        runs,
        key=lambda name: json.loads((asked.folder / name / "manifest.json").read_text())["created"],
    )
    made, alive = survivors(asked.folder, order, asked.count, asked.seed)
    for line in sorted(alive):
        print(line)
    print(
        f"{made} edits, {len(alive)} that nothing names; by file:"
        f" {dict(Counter(a.split()[2] for a in alive))}"
    )
    sys.exit(bool(alive))


if __name__ == "__main__":
    main()
