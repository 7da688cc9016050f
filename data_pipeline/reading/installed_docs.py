"""English prose that every installation has: the documentation inside Python and its installed packages.

Only the standard library and the distributions that this package needs to run are read, so the corpus does not
depend on what else is installed. Nothing is imported: Python files are parsed.
"""

import ast
import hashlib
import json
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from email import message_from_string
from functools import cached_property
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

import orjson
from packaging.requirements import Requirement

from data_pipeline.document import Document, Malformed, size_bytes
from data_pipeline.reading.config import INSTALLED_DOCS
from data_pipeline.reading.pieces import Piece, cut_lines
from data_pipeline.reading.readers import Limit, mend_surrogates
from data_pipeline.work.tasks import MARKER, Counts, Input, Settings
from data_pipeline.work.workspace import Workspace
from lineage.digest import sha256_json
from lineage.errors import DataMissing

PACKAGE = "mlm-repro"
HARVESTED = "documents.jsonl"
GROUP_FILES = 64
TYPICAL_BYTES = 40_000_000
TEXT_SUFFIXES = (".md", ".rst", ".txt")
LEGAL = re.compile(r"(licen[cs]e|copying|notice|authors|readme)", re.IGNORECASE)
TOPICS = "pydoc_data/topics.py"
TEST_FOLDERS = {"test", "tests"}
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__")

Place = tuple[str, str, Path]
"""Distribution, path inside it, path on disk."""


class InstalledDocs:
    """Docstrings, package descriptions, manuals and licences, in order of distribution and path; Python comes last.

    With a limit, files are read in the order of a hash of the seed and their name until it is reached: a uniform
    sample of files, whose documents come in the same order as all would.
    """

    name = INSTALLED_DOCS

    def __init__(self, max_documents: int | None = None, max_bytes: int | None = None, seed: int = 1234) -> None:
        self._max_documents, self._max_bytes, self._seed = max_documents, max_bytes, seed
        self._sample = ""

    @cached_property
    def _distributions(self) -> dict[str, Distribution]:
        return run_time_distributions(PACKAGE)

    def fingerprint(self) -> str:
        versions = [f"{name}=={installed.version}" for name, installed in sorted(self._distributions.items())]
        return sha256_json({"python": platform.python_version(), "distributions": versions})

    def describe(self) -> str:
        version, count = platform.python_version(), len(self._distributions)
        return f"{self.name}: documentation of Python {version} and {count} installed packages{self._sample}"

    @property
    def total_bytes(self) -> int:
        return self._max_bytes or TYPICAL_BYTES

    def pieces(self, workspace: Workspace, shard_bytes: int) -> Iterator[Piece]:
        places = [*_distribution_files(self._distributions), *_standard_library_files()]
        order = list(range(len(places)))
        if self._max_documents or self._max_bytes:
            order.sort(key=lambda number: hashlib.sha256(f"{self._seed}:{places[number][:2]}".encode()).digest())
        groups = [order[start : start + GROUP_FILES] for start in range(0, len(order), GROUP_FILES)]
        jobs = (({"places": [[*places[n][:2], str(places[n][2])] for n in group]}, ()) for group in groups)
        limit = Limit(self._max_documents, self._max_bytes)
        takes: list[tuple[int, int, int]] = []
        read: list[str] = []

        def harvested_sizes() -> Iterator[list[int | None]]:
            for done in workspace.each("harvest", harvest, jobs, self.name, len(groups)):
                read.append(done.digest)
                yield from done.counts["sizes"]

        for place, (number, sizes) in enumerate(zip(order, harvested_sizes(), strict=False)):
            takes.append((number, place, _within(limit, sizes)))
            if limit.reached:
                break
        used = [take for take in takes if take[2]]
        if len(takes) < len(places):
            self._sample = f", a sample of {len(used):,} of {len(places):,} files"
        harvested = Input(workspace.path / "harvest", sha256_json(read))
        arranged = workspace.one("arrange", arrange, {"takes": sorted(takes), "groups": len(read)}, harvested)
        path = arranged.path / "00000" / HARVESTED
        whole = Piece("harvest", self.name, str(path), arranged.digest, path.stat().st_size)
        yield from cut_lines(whole, shard_bytes)


def _within(limit: Limit, sizes: list[int | None]) -> int:
    """How many of a file's items come before one that is not within the limit; None is no document."""
    for number, size in enumerate(sizes):
        if size is not None and not limit.admits(size):
            return number
    return len(sizes)


def harvest(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Extract a group of files; counts the bytes of each file's documents."""
    sizes = []
    with (directory / HARVESTED).open("wb") as file:
        for owner, inside, path in settings["places"]:
            items = extract((owner, inside, Path(path)))
            file.writelines(orjson.dumps(asdict(item)) + b"\n" for item in items)
            sizes.append([size_bytes(item.text) if isinstance(item, Document) else None for item in items])
    return {"sizes": sizes}


def arrange(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Put what was taken of each harvested file into the order of the files' names."""
    files: list[list[bytes]] = []
    for group in range(settings["groups"]):
        folder = inputs[0] / f"{group:05d}"
        sizes = json.loads((folder / MARKER).read_text(encoding="utf-8"))["counts"]["sizes"]
        with (folder / HARVESTED).open("rb") as file:
            files += ([file.readline() for _ in items] for items in sizes)
    with (directory / HARVESTED).open("wb") as file:
        for _, place, take in settings["takes"]:
            file.writelines(files[place][:take])
    return {}


def run_time_distributions(package: str) -> dict[str, Distribution]:
    """Installed distributions that `package` needs to run, directly or not, by normalised name; extras are left out.

    Raises DataMissing if `package` itself is not installed.
    """
    try:
        queue = [distribution(package)]
    except PackageNotFoundError as error:
        raise DataMissing(
            f"{package} is not installed, so its documentation cannot be found: pip install -e ."
        ) from error
    needed: dict[str, Distribution] = {}
    while queue:
        for text in queue.pop().requires or []:
            requirement = Requirement(text)
            name = re.sub(r"[-_.]+", "-", requirement.name).lower()
            is_extra = requirement.marker and not requirement.marker.evaluate({"extra": ""})
            if is_extra or name in (*needed, package):
                continue
            try:
                needed[name] = distribution(name)
            except PackageNotFoundError:
                continue
            queue.append(needed[name])
    return needed


def extract(place: Place) -> list[Document | Malformed]:
    """The documents in one file."""
    owner, inside, path = place
    name = f"{owner}:{inside}"
    try:
        content = path.read_bytes()
        text = content.decode("utf-8")
    except OSError as error:
        return [Malformed(name, 1, f"cannot be read: {error.strerror}", "")]
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return [Malformed(name, line, f"invalid UTF-8 at byte {error.start}", "")]
    if path.name == "METADATA":
        texts = [(name, str(message_from_string(text).get_payload()))]
    elif path.suffix != ".py":
        texts = [(name, text)]
    else:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError) as error:
            line = getattr(error, "lineno", None) or 1
            return [Malformed(name, line, f"not Python: {getattr(error, 'msg', error)}", "")]
        texts = list(_topics(name, tree) if inside == TOPICS else _docstrings(name, tree))
    return [Document(identifier, mend_surrogates(text)) for identifier, text in texts if text.strip()]


def _docstrings(name: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """One text for the module, each top-level function, and each top-level class with its methods."""
    yield name, ast.get_docstring(tree) or ""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{name}:{node.name}", ast.get_docstring(node) or ""
        elif isinstance(node, ast.ClassDef):
            methods = (item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))
            texts = (ast.get_docstring(item) for item in (node, *methods))
            yield f"{name}:{node.name}", "\n\n".join(filter(None, texts))


def _topics(name: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The language reference that `help()` shows: a dictionary of topics."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for topic, text in sorted(ast.literal_eval(node.value).items()):
                yield f"{name}:{topic}", text


def _is_wanted(inside: PurePosixPath) -> bool:
    if inside.parent.suffix == ".dist-info":
        return inside.name == "METADATA" or bool(LEGAL.match(inside.name))
    if inside.suffix == ".py" or (not inside.suffix and LEGAL.match(inside.name)):
        return True
    return inside.suffix in TEXT_SUFFIXES and not TEST_FOLDERS.intersection(inside.parts)


def _distribution_files(distributions: dict[str, Distribution]) -> Iterator[Place]:
    for owner, installed in sorted(distributions.items()):
        for inside in sorted(installed.files or [], key=str):
            path = Path(str(installed.locate_file(inside)))
            if _is_wanted(PurePosixPath(inside)) and ".." not in inside.parts and path.is_file():
                yield owner, inside.as_posix(), path


def _standard_library_files() -> Iterator[Place]:
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[PurePosixPath] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        paths += (PurePosixPath((Path(folder) / name).relative_to(root).as_posix()) for name in names)
    for inside in sorted(filter(_is_wanted, paths), key=str):
        yield "python", str(inside), root / inside
