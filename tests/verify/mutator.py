"""Edits that a forger could make, of every folder, file and key of a folder of runs: each is sealed
anew, and verified.

`python -m tests.verify.mutator FOLDER/runs --count 2000 --seed 1` prints the edits that nothing
names. The directory has honest runs, such as `python -m tests.verify.every_kind FOLDER` makes.
Edits are drawn from all runs in turn. Only the run that was edited is sealed, verified and put
back. With `--each scale` every key of every schema is edited once: of edits of that kind that
differ in numbers alone, as in a line or the name of a checkpoint, one is drawn.
"""

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from mlm_repro.lineage.chain import CHECKPOINTS, complete_checkpoints
from mlm_repro.lineage.digest import MARKER, is_sealed, seal
from mlm_repro.lineage.errors import UserError
from mlm_repro.lineage.kinds import ALWAYS_FREE
from mlm_repro.verify.recomputed import KINDS, RunCheck
from tests.verify.every_kind import kind_in

WIDE = str.maketrans("0123456789", "０１２３４５６７８９")
LINES = (0, 1, -1)
"""Lines of a file of lines that are edited."""
OF_FOLDERS = ("delete folder", "duplicate folder", "link folder", "rename folder", "swap folder")
OF_FILES = (
    *("delete", "duplicate", "link", "rename", "look-alike", "swap", "empty", "cut", "plant"),
    *("folder of its name", "hard copy of another", "append"),
)
OF_LINES = ("repeat line", "drop line", "turn lines")
OF_KEYS = (
    *("delete key", "add key", "repeat key", "look-alike key", "scale", "null", "text", "endless"),
    *(
        "exchange",
        "nudge",
        "negative",
        "zero",
        "fraction",
        "repeat item",
        "drop item",
        "turn items",
    ),
)
NAMED_ANYWHERE = (
    *OF_FOLDERS,
    *("duplicate", "link", "rename", "look-alike", "plant", "folder of its name", "repeat key"),
)
"""Edits that no file is free to have."""

KEYS = re.compile(r"(\S+): ([\w.*, ]+)")
WEIGHTS = re.compile(r"\S+\.safetensors")
"""What a sentence on what was not compared names: files, each with keys; files of weights, of which
it speaks of the last bits."""
IN_ANY_ORDER = {
    "examples": "the order of an evaluation's examples",
    "documents": "the order of documents in overlap.json",
}
"""Lists by key, with the words that `mlm-verify run` prints of their order."""


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
        if name == MARKER or f"{name}/".startswith("report/") or "/." in f"/{name}":
            continue
        if path.is_dir():
            yield from (Edit(kind, name) for kind in OF_FOLDERS)
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


def _edit_folder(kind: str, path: Path, run: Path) -> bool:
    """Make an edit of a folder; False if it has no other beside it to be exchanged with."""
    beside = sorted(each for each in path.parent.iterdir() if each.is_dir() and each != path)
    elsewhere = run.parent / "elsewhere"
    match kind:
        case "delete folder":
            shutil.rmtree(path)
        case "duplicate folder":
            shutil.copytree(path, path.with_name(f"{path.name}1"))
        case "link folder":
            path.rename(elsewhere)
            path.symlink_to(elsewhere)
        case "rename folder":
            path.rename(path.with_name(f"{path.name}2"))
        case "swap folder":
            if not beside:
                return False
            path.rename(elsewhere)
            beside[-1].rename(path)
            elsewhere.rename(beside[-1])
    return True


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
    path = run / edit.file
    if edit.kind in OF_FOLDERS:
        return _edit_folder(edit.kind, path, run)
    before = path.read_bytes()
    if edit.key:
        return _apply_key(edit, path) and path.read_bytes() != before
    beside = sorted(
        each for each in path.parent.iterdir() if each.is_file() and each.suffix == path.suffix
    )
    other = beside[(beside.index(path) + 1) % len(beside)]
    match edit.kind:
        case "delete":
            if path.name == MARKER and path.parent.parent.name == CHECKPOINTS:  # written anew
                return False
            if path.suffix == ".json" and not _read(path):  # as good as absent
                return False
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
        case "folder of its name":
            path.unlink()
            path.mkdir()
            (path / path.name).write_bytes(before)
        case "hard copy of another":
            if other == path or other.read_bytes() == before:
                return False
            path.unlink()
            path.hardlink_to(other)
        case "append":
            if path.name == MARKER:
                return False
            path.write_bytes(before + before[-64:])
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
            into = value if isinstance(value, dict) else place
            if not isinstance(into, dict):
                return False
            into["added"] = 1
        case "repeat key":
            place["mark"] = "mark"
            raw = (mark, f"{json.dumps(last)}: {json.dumps(_scaled(value))}")
        case "look-alike key":
            if "a" not in str(last) or not value:  # as good as absent under either name
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
        case "nudge" | "negative" | "zero" | "fraction":
            if isinstance(value, bool) or not isinstance(value, int | float) or not value:
                return False
            place[last] = {
                "nudge": value * (1 + 1e-6),
                "negative": -value,
                "zero": 0,
                "fraction": value + 0.5,
            }[edit.kind]
        case "repeat item" | "drop item" | "turn items":
            if not isinstance(value, list) or not value:
                return False
            new = {
                "repeat item": [*value, value[-1]],
                "drop item": value[:-1],
                "turn items": value[::-1],
            }[edit.kind]
            if new == value:
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


def reseal(run: Path) -> None:
    """Seal what lies inside of a run, then the run."""
    inner = {marker.parent for marker in run.rglob(MARKER)} | {*(run / CHECKPOINTS).glob("*")}
    for place in sorted(inner - {run}):
        if place.is_dir() and not place.is_symlink():
            with suppress(UserError, OSError):
                seal(place)
    with suppress(UserError, OSError):
        seal(run)


def said_of(run: Path, others: set[Path]) -> set[str]:
    """What the verification of a run says against it, or that it does not compare. The other runs
    are honest, and are not verified again."""
    try:
        check = RunCheck(run, set(others))
    except (UserError, OSError, ValueError, KeyError) as error:
        return {str(error)}
    return {*check.broken, *check.absent}


def is_said_to_be_free(run: Path, edit: Edit, left: list[str]) -> bool:
    """True for a value or the content of a file that, as `mlm-verify run` prints, nothing
    contradicts, or that a sentence on what was not compared names."""
    if edit.kind == "delete folder" and edit.file in _older_checkpoints(run):
        return "a checkpoint before the newest, left out" in KINDS[kind_in(run)].free
    if edit.kind in NAMED_ANYWHERE:
        return False
    kind = KINDS[kind_in(run)]
    if edit.kind == "turn lines" and "shard-" in edit.file:
        return "the order of lines in shard-*.jsonl" in kind.free
    if edit.kind == "turn items" and edit.key[-1] in IN_ANY_ORDER:
        return IN_ANY_ORDER[edit.key[-1]] in kind.free
    named = f"{edit.file} {'.'.join(map(str, edit.key))}".strip()
    if edit.kind == "scale" and any(Path(edit.file).name in WEIGHTS.findall(each) for each in left):
        return True
    not_compared = [
        f"{file} {key}"
        for file, keys in chain.from_iterable(map(KEYS.findall, left))
        for key in keys.split(", ")
    ]
    free = (*ALWAYS_FREE, *kind.free, *not_compared)
    return any(fnmatch(named, f"{pattern}*") for pattern in free)


def _older_checkpoints(run: Path) -> list[str]:
    return [f"{CHECKPOINTS}/{path.name}" for path in complete_checkpoints(run)[:-1]]


def one_of_each(every: list[Edit], kinds: list[str]) -> list[Edit]:
    """Edits of these kinds without those that differ from another in numbers alone."""
    apart = {re.sub(r"[0-9]+", "0", str(edit)): edit for edit in every if edit.kind in kinds}
    return list(apart.values())


def survivors(
    folder: Path, names: list[str], count: int, seed: int, each: list[str] | None = None
) -> tuple[Counter[str], list[str]]:
    """Make `count` edits of the runs of these names, or all that there are, each put back after it;
    with `each` those of these kinds, one of each.

    Returns how many were made by kind of run, and those that nothing named. A page is left out: it
    is made again of what the files say.
    """
    random_order, alive, made = random.Random(seed), list[str](), Counter[str]()
    left = {name: list(edits(folder / name)) for name in names}
    for name, every in left.items():
        random_order.shuffle(every)
        left[name] = one_of_each(every, each) if each else every
    turns = chain.from_iterable(
        zip_longest(*([(name, each) for each in left[name]] for name in left))
    )
    with tempfile.TemporaryDirectory() as place:
        runs = Path(shutil.copytree(folder, Path(place) / "runs", symlinks=True)).resolve()
        for report in runs.glob("*/report"):
            shutil.rmtree(report)
            reseal(report.parent)
        honest = Path(shutil.copytree(runs, Path(place) / "honest", symlinks=True))
        places = {path for path in runs.iterdir() if path.is_dir() and not path.is_symlink()}
        before = {name: said_of(runs / name, places - {runs / name}) for name in names}
        checks = {name: RunCheck(runs / name) for name in names}
        for name, edit in filter(None, turns):
            if made.total() >= count:
                break
            run = runs / name
            left = [*checks[name].absent, *checks[name].left]
            if is_said_to_be_free(run, edit, left) or not apply(edit, run):
                continue
            made[kind_in(honest / name)] += 1
            reseal(run)
            try:
                if not said_of(run, places - {run}) - before[name]:
                    alive.append(f"{name}: {edit}")
            except Exception as fault:  # a verification that fails names nothing
                alive.append(f"{name}: {edit}: {fault!r}")
            _put_back(honest / name, run)
    return made, alive


def _put_back(honest: Path, run: Path) -> None:
    elsewhere = run.parent / "elsewhere"
    for path in (run, elsewhere):
        if path.is_dir():
            shutil.rmtree(path)
    elsewhere.unlink(missing_ok=True)
    shutil.copytree(honest, run, symlinks=True)


def main() -> None:
    """Entry point; exit code 1 if something survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200, help="edits that are made")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--each", action="append", choices=(*OF_FOLDERS, *OF_FILES, *OF_LINES, *OF_KEYS)
    )
    asked = parser.parse_args()
    names = [
        run.name
        for run in sorted(asked.folder.iterdir())
        if is_sealed(run) and not run.is_symlink()
    ]
    if not names:
        parser.error(f"no run in {asked.folder} is sealed")
    made, alive = survivors(asked.folder, names, asked.count, asked.seed, asked.each)
    for line in sorted(alive):
        print(line)
    print(f"{made.total()} edits, {len(alive)} that nothing names; made by kind: {dict(made)}")
    sys.exit(bool(alive))


if __name__ == "__main__":
    main()
