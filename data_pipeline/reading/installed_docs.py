"""English that every installation has: the documentation inside Python and its installed packages.

Only the standard library and the distributions that this package needs to run are read, so the
corpus does not depend on what else is installed. Nothing is imported, and of the Python files only
the topics of `help()` are parsed.
"""

import ast
import inspect
import os
import platform
import re
import sysconfig
from collections.abc import Iterator
from email import message_from_string
from functools import cached_property
from hashlib import sha256
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from itertools import takewhile
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement

from mlm_repro.data_pipeline.document import Document, Malformed, json_line
from mlm_repro.data_pipeline.reading.config import INSTALLED_DOCS, SourcesConfig
from mlm_repro.data_pipeline.reading.pieces import Piece, cut_lines
from mlm_repro.data_pipeline.reading.readers import (
    MAX_LINE_BYTES,
    Limit,
    mend_surrogates,
    text_document,
)
from mlm_repro.data_pipeline.work.tasks import Counts, Settings
from mlm_repro.data_pipeline.work.workspace import Workspace
from mlm_repro.lineage.digest import sha256_json
from mlm_repro.lineage.errors import DataMissing, cause

PACKAGE = "mlm-repro"
PYTHON = "python"
TEXT_SUFFIXES = (".md", ".rst", ".txt")
UNWANTED = re.compile(r"(licen[cs]e|copying|notice|authors|change|history|third)", re.IGNORECASE)
TEST_FOLDERS = {"test", "tests"}
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__")
TOPICS = "pydoc_data/topics.py"
LEGAL = re.compile(r"copyright|licen[cs]e", re.IGNORECASE)
IN_PYTHON = re.compile(
    r"""((?:^[ \t]*\#.*\n)+)|\#.*|("{3}|'{3})([\s\S]*?)\2|"""
    r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""",
    re.MULTILINE,
)
"""Matches comments of whole lines (group 1), triple-quoted strings (group 3), and any text that can
hide either."""
COMMENT_SIGN = re.compile(r"^[ \t]*#+[:!]? ?", re.MULTILINE)
HARVESTED = "documents.jsonl"

Place = tuple[str, str, Path]
"""A file as a triple: the name of its distribution, its path inside the distribution, its path on
disk."""


class InstalledDocs:
    """Source of the documentation that is installed: strings and comments in Python, package
    descriptions and manuals, in order of distribution and path; Python's standard library comes
    last. The method `pieces` writes it to a file of the build's workspace and yields Pieces of that
    file.

    If `config` has `max_documents` or `max_bytes`, files are read in the order of a hash of the
    seed and their name until a document would exceed one of the two: a random sample of files,
    whose documents keep the order of the whole.
    """

    name = INSTALLED_DOCS

    def __init__(self, config: SourcesConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._sample = ""

    @cached_property
    def _distributions(self) -> dict[str, Distribution]:
        return run_time_distributions(PACKAGE)

    @cached_property
    def places(self) -> list[Place]:
        """List of a triple (name of the distribution, path inside it, path on disk) for each file
        to read documentation from: Python files, package descriptions and texts of the
        distributions and, last, the standard library, except legal texts, lists of changes and
        texts in folders of tests. Raises DataMissing if this package itself is not installed."""
        return [*_distribution_files(self._distributions), *_standard_library_files()]

    @property
    def versions(self) -> dict[str, str]:
        """Dict name → version of each installed package whose documentation is read, and of
        Python."""
        installed = {
            name: installed_distribution.version
            for name, installed_distribution in sorted(self._distributions.items())
        }
        return {**installed, PYTHON: platform.python_version()}

    def fingerprint(self) -> str:
        """Return a digest of the versions of Python and of the installed packages whose
        documentation is read; the documentation itself does not count. Raises DataMissing if this
        package itself is not installed."""
        versions = [
            f"{name}=={version}" for name, version in self.versions.items() if name != PYTHON
        ]
        return sha256_json({"python": platform.python_version(), "distributions": versions})

    def describe(self) -> str:
        """Return a text of one line for the ledger: this source's name, the version of Python and
        the number of installed packages that this package needs to run, whose documentation is
        read. Once `pieces` has drawn a sample, the number of files in the sample and the number of
        all files are in the text too. Raises DataMissing if this package is not installed."""
        version = platform.python_version()
        count = len(self._distributions)
        return (
            f"{self.name}: documentation of Python {version} and {count} installed"
            f" packages{self._sample}"
        )

    @property
    def total_bytes(self) -> int:
        """Approximate number of bytes of text: the recipe's limit `max_bytes` or, without a limit,
        a typical size of 60 MB."""
        return self._config.max_bytes or 60_000_000

    def pieces(self, workspace: Workspace, shard_bytes: int) -> Iterator[Piece]:
        """Write the documentation that is installed here, or a sample of it within the recipe's
        limits, to one file of the workspace by a task, and yield that file in Pieces of
        `shard_bytes`, the last one shorter. Raises DataMissing if this package itself is not
        installed."""
        settings = {
            "places": [(owner, inside, str(path)) for owner, inside, path in self.places],
            "seed": self._seed,
            "fingerprint": self.fingerprint(),
            **self._config.model_dump(include={"max_documents", "max_bytes", "max_line_bytes"}),
        }
        harvested = workspace.all(f"harvest-{self.name}", harvest, [(settings, ())], self.name)
        if harvested.counts[0]["sampled"]:
            self._sample = (
                f", a sample of {harvested.counts[0]['files']:,} of {len(self.places):,} files"
            )
        path = harvested.path / "00000" / HARVESTED
        yield from cut_lines(
            Piece("harvest", self.name, str(path), harvested.digest, path.stat().st_size),
            shard_bytes,
        )


def run_time_distributions(package: str) -> dict[str, Distribution]:
    """Return a dict normalised name → Distribution of the installed distributions that `package`
    needs to run, directly or not, without `package` itself. Extras, and what is not installed, are
    left out.

    Raises DataMissing if `package` itself is not installed.
    """
    try:
        queue = [distribution(package)]
    except PackageNotFoundError as error:
        why = (
            f"{package} is not installed, so that installed-docs cannot tell which packages it"
            " needs: run `pip install -e .` in its checkout"
        )
        raise DataMissing(why) from error
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
    """Yield a triple ("python", path below the library's folder, path on disk) for each Python file
    and text of the standard library, sorted by path, except legal texts, lists of changes and texts
    in folders of tests."""
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[PurePosixPath] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        paths += (
            PurePosixPath((Path(folder) / name).relative_to(root).as_posix()) for name in names
        )
    for inside in sorted(filter(_is_wanted, paths), key=str):
        yield PYTHON, str(inside), root / inside


def harvest(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Task: write the documents and malformed input of all installed documentation files, or of a
    random sample of them, in the order of the files, as JSON lines to `documents.jsonl`. Settings:
    `places`, triples as in `InstalledDocs.places`; `seed`; `max_documents` and `max_bytes`, which
    limit a sample, each None for no limit; `max_line_bytes`. Returns `files`, the number of files
    that gave a line, and `sampled`, True if a limit left a document out."""
    places = [(owner, inside, Path(path)) for owner, inside, path in settings["places"]]
    order = list(range(len(places)))
    if settings["max_documents"] or settings["max_bytes"]:
        order.sort(
            key=lambda number: sha256(f"{settings['seed']}:{places[number][:2]}".encode()).digest()
        )
    limit = Limit(settings["max_documents"], settings["max_bytes"])
    taken = {}
    for number in order:
        items = takewhile(limit.admits, extract(places[number], settings["max_line_bytes"]))
        if lines := b"".join(map(json_line, items)):
            taken[number] = lines
        if limit.reached:
            break
    (directory / HARVESTED).write_bytes(b"".join(taken[number] for number in sorted(taken)))
    return {"files": len(taken), "sampled": limit.reached}


def extract(place: Place, max_line_bytes: int = MAX_LINE_BYTES) -> list[Document | Malformed]:
    """Return a list of the documents in one file, `place` (distribution, path inside it, path on
    disk): one of a Python module, with its triple-quoted strings and whole-line comments alone, of
    a package description, without its header, or of plain text; one for each topic of the module
    with the topics of `help()`; none for a file without text. A file that cannot be read, has more
    than `max_line_bytes` or is not UTF-8 gives one record of malformed input."""
    owner, inside, path = place
    name = mend_surrogates(f"{owner}:{inside}")
    try:
        with path.open("rb") as file:
            content = text_document(name, file.read(max_line_bytes + 1), max_line_bytes)
    except OSError as error:
        return [Malformed(name, 1, f"cannot be read: {cause(error)}", "")]
    if isinstance(content, Malformed):
        return [content]
    texts = [(name, content.text)]
    if PurePosixPath(inside).name == "METADATA":
        texts = [(name, str(message_from_string(content.text).get_payload()))]
    elif inside == TOPICS:
        texts = list(_topics(name, ast.parse(content.text)))
    elif inside.endswith(".py"):
        texts = [(name, "\n\n".join(_paragraphs_in_python(content.text)))]
    return [
        Document(identifier, mend_surrogates(text)) for identifier, text in texts if text.strip()
    ]


def _paragraphs_in_python(code: str) -> Iterator[str]:
    """Yield as texts the paragraphs, between blank lines, of the triple-quoted strings and
    whole-line comments in Python code, in the order of the code, without indentation, quotes and
    comment signs. A paragraph with the words copyright or licence is left out. Strings and comments
    are found by a pattern; the code is not parsed."""
    for match in IN_PYTHON.finditer(code):
        text = (
            inspect.cleandoc(match[3])
            if match[3]
            else COMMENT_SIGN.sub("", match[1] or "").strip("\n")
        )
        yield from (
            paragraph
            for paragraph in re.split(r"\n\s*\n", text)
            if paragraph and not LEGAL.search(paragraph)
        )


def _topics(name: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield a pair, id and text, for each entry of the language reference that `help()` shows,
    sorted by topic, from `tree`, the syntax tree of the module that holds the entries as a dict
    topic → text. An id is `name:TOPIC`, where `name` is the name of the module's file."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for topic, text in sorted(ast.literal_eval(node.value).items()):
                yield f"{name}:{topic}", text
