"""English that every installation has: the documentation inside Python and its installed packages.

Only the standard library and the distributions that this package needs to run are read, so the corpus does not
depend on what else is installed. Nothing is imported, and Python files are not parsed.
"""

import ast
import hashlib
import inspect
import os
import platform
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict
from email import message_from_string
from functools import cached_property
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

import orjson
from packaging.requirements import Requirement

from data_pipeline.document import Document, Malformed, size_bytes
from data_pipeline.reading.config import INSTALLED_DOCS, SourcesConfig
from data_pipeline.reading.pieces import Piece, cut_lines
from data_pipeline.reading.readers import Limit, Limits, mend_surrogates, text_document
from data_pipeline.work.tasks import MARKER, Counts, Input, Settings
from data_pipeline.work.workspace import Workspace
from lineage.atomic import read_json
from lineage.digest import sha256_json
from lineage.errors import DataMissing

PACKAGE = "mlm-repro"
TEXT_SUFFIXES = (".md", ".rst", ".txt")
UNWANTED = re.compile(r"(licen[cs]e|copying|notice|authors|change|history|third)", re.IGNORECASE)
TEST_FOLDERS = {"test", "tests"}
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__")
TOPICS = "pydoc_data/topics.py"
LEGAL = re.compile(r"copyright|licen[cs]e", re.IGNORECASE)
IN_PYTHON = re.compile(
    r"""((?:^[ \t]*\#.*\n)+)|\#.*|("{3}|'{3})([\s\S]*?)\2|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.MULTILINE
)
"""Matches comments of whole lines (group 1), triple-quoted strings (group 3), and the text that can hide either."""
COMMENT_SIGN = re.compile(r"^[ \t]*#+[:!]? ?", re.MULTILINE)
HARVESTED = "documents.jsonl"
GROUP_FILES = 64

Place = tuple[str, str, Path]
"""Distribution, path inside it, path on disk."""


class InstalledDocs:
    """Strings and comments in Python, package descriptions and manuals, in order of distribution and path.

    Python comes last. With a limit, files are read in the order of a hash of the seed and their name until the limit
    is reached: a uniform sample of files, whose documents keep the order of the whole.
    """

    name = INSTALLED_DOCS

    def __init__(self, config: SourcesConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        self._sample = ""

    @cached_property
    def _distributions(self) -> dict[str, Distribution]:
        return run_time_distributions(PACKAGE)

    @cached_property
    def places(self) -> list[Place]:
        """Files with words for people, but no legal texts and no lists of changes."""
        return [*_distribution_files(self._distributions), *_standard_library_files()]

    def fingerprint(self) -> str:
        versions = [f"{name}=={installed.version}" for name, installed in sorted(self._distributions.items())]
        return sha256_json({"python": platform.python_version(), "distributions": versions})

    def describe(self) -> str:
        version, count = platform.python_version(), len(self._distributions)
        return f"{self.name}: documentation of Python {version} and {count} installed packages{self._sample}"

    @property
    def total_bytes(self) -> int:
        return self._config.max_bytes or 60_000_000

    def pieces(self, workspace: Workspace, shard_bytes: int) -> Iterator[Piece]:
        places, config = self.places, self._config
        order = list(range(len(places)))
        if config.max_documents or config.max_bytes:
            order.sort(key=lambda number: hashlib.sha256(f"{self._seed}:{places[number][:2]}".encode()).digest())
        groups = [order[start : start + GROUP_FILES] for start in range(0, len(order), GROUP_FILES)]
        fixed = {"limits": asdict(config.limits)}
        jobs = (({**fixed, "places": [[*places[n][:2], str(places[n][2])] for n in group]}, ()) for group in groups)
        limit = Limit(config.max_documents, config.max_bytes)
        takes: list[tuple[int, int, int]] = []
        read: list[str] = []

        def harvested_sizes() -> Iterator[list[int | None]]:
            for done in workspace.each(f"harvest-{self.name}", harvest, jobs, self.name, len(groups)):
                read.append(done.digest)
                yield from done.counts["sizes"]

        for place, (number, sizes) in enumerate(zip(order, harvested_sizes(), strict=False)):
            takes.append((number, place, _within(limit, sizes)))
            if limit.reached:
                break
        used = [take for take in takes if take[2]]
        if len(takes) < len(places):
            self._sample = f", a sample of {len(used):,} of {len(places):,} files"
        harvested = Input(workspace.path / f"harvest-{self.name}", sha256_json(read))
        arranged = workspace.one(
            f"arrange-{self.name}", arrange, {"takes": sorted(takes), "groups": len(read)}, harvested
        )
        path = arranged.path / "00000" / HARVESTED
        whole = Piece("harvest", self.name, str(path), arranged.digest, path.stat().st_size)
        yield from cut_lines(whole, shard_bytes)


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


def _is_wanted(inside: PurePosixPath) -> bool:
    if inside.suffix == ".py" or inside.name == "METADATA":
        return True
    is_text = inside.suffix in TEXT_SUFFIXES and not UNWANTED.match(inside.name)
    return is_text and not TEST_FOLDERS.intersection(inside.parts)


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


def _within(limit: Limit, sizes: list[int | None]) -> int:
    """Number of a file's items before the limit is reached; None stands for a malformed item."""
    for number, size in enumerate(sizes):
        if size is not None and not limit.admits(size):
            return number
    return len(sizes)


def harvest(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Extract a group of files; counts the bytes of each file's documents."""
    sizes, limits = [], Limits(**settings["limits"])
    with (directory / HARVESTED).open("wb") as file:
        for owner, inside, path in settings["places"]:
            items = extract((owner, inside, Path(path)), limits)
            file.writelines(orjson.dumps(asdict(item)) + b"\n" for item in items)
            sizes.append([size_bytes(item.text) if isinstance(item, Document) else None for item in items])
    return {"sizes": sizes}


def arrange(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Write the documents taken from each harvested file in the order of the files' names."""
    files: list[list[bytes]] = []
    for group in range(settings["groups"]):
        folder = inputs[0] / f"{group:05d}"
        sizes = read_json(folder / MARKER)["counts"]["sizes"]
        with (folder / HARVESTED).open("rb") as file:
            files += ([file.readline() for _ in items] for items in sizes)
    with (directory / HARVESTED).open("wb") as file:
        for _, place, take in settings["takes"]:
            file.writelines(files[place][:take])
    return {}


def extract(place: Place, limits: Limits) -> list[Document | Malformed]:
    """The documents in one file: Python modules, package descriptions, plain text."""
    owner, inside, path = place
    name = mend_surrogates(f"{owner}:{inside}")
    try:
        with path.open("rb") as file:
            content = text_document(name, file.read(limits.max_line_bytes + 1), limits)
    except OSError as error:
        return [Malformed(name, 1, f"cannot be read: {error.strerror or error}", "")]
    if isinstance(content, Malformed):
        return [content]
    texts = [(name, content.text)]
    if PurePosixPath(inside).name == "METADATA":
        texts = [(name, str(message_from_string(content.text).get_payload()))]
    elif inside == TOPICS:
        texts = list(_topics(name, ast.parse(content.text)))
    elif inside.endswith(".py"):
        texts = [(name, "\n\n".join(_paragraphs_in_python(content.text)))]
    return [Document(identifier, mend_surrogates(text)) for identifier, text in texts if text.strip()]


def _paragraphs_in_python(code: str) -> Iterator[str]:
    """Paragraphs of triple-quoted strings and whole-line comments, without legal ones; the code is not parsed."""
    for match in IN_PYTHON.finditer(code):
        text = inspect.cleandoc(match[3]) if match[3] else COMMENT_SIGN.sub("", match[1] or "").strip("\n")
        yield from (part for part in re.split(r"\n\s*\n", text) if part and not LEGAL.search(part))


def _topics(name: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Entries of the language reference that `help()` shows."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for topic, text in sorted(ast.literal_eval(node.value).items()):
                yield f"{name}:{topic}", text
