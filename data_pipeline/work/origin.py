"""The code that a stage runs and the libraries that this calls: with input and settings they decide its bytes.

Code is that of a stage's own modules and of all modules of this package that they import, also inside functions. It is
compared as a syntax tree: comments, docstrings, layout and what is said on a terminal do not count. A library counts
with the content of its installed files, since one version may stand for several contents.
"""

import ast
import hashlib
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlm_repro.lineage.digest import sha256_file, sha256_json
from mlm_repro.lineage.extras import installed
from mlm_repro.lineage.remembered import answers_on_files, stamp_of
from mlm_repro.lineage.shipped import HOME

PACKAGE, ERRORS = "mlm_repro.", "lineage.errors"
SILENT = {
    "lineage": "has the number of the version, which the manifest states",
    "lineage.config": "reads recipes, whose values count themselves",
    "lineage.digest": "takes SHA-256 sums",
    "lineage.environment": "describes the machine and finds folders",
    ERRORS: "has the errors that end a command",
    "lineage.extras": "finds libraries that may be missing",
    "lineage.files": "checks JSON files that are read",
    "lineage.lock": "locks directories for a process",
    "lineage.processes": "starts and ends threads and processes",
    "lineage.progress": "prints how far the work is",
    "lineage.remembered": "keeps answers with a digest of what made them",
    "lineage.run": "makes the directory of a run",
    "lineage.shipped": "finds files of this package",
    "lineage.variables": "reads numbers in the environment",
    "data_pipeline.config": "is the form of a recipe, whose values count themselves",
    "data_pipeline.contamination.testsets": "finds files, whose digests count themselves",
    "data_pipeline.reading.config": "is the form of a recipe's sources, whose values count themselves",
    "data_pipeline.stages": "finds all stages; those of the recipe count themselves",
    "data_pipeline.work.executors.local": "gives tasks to processes",
    "data_pipeline.work.executors.part": "gives tasks to the parts of an array",
    "data_pipeline.work.executors.ray": "gives tasks to a cluster",
    "data_pipeline.work.meeting": "lets the parts of an array find each other",
    "data_pipeline.work.origin": "tells what counts",
    "data_pipeline.work.tasks": "keeps what tasks made",
    "data_pipeline.work.workspace": "keeps what tasks made",
}
"""Modules that say, lock, find or place things and compute no byte of a dataset, with the reason; a closed list."""
OPTIONAL = {
    "hub": ("reading.hub",),
    "installed-docs": ("reading.installed_docs",),
    "tokenizer": ("tokens.tokenizer", "passes.train_tokenizer"),
    "deduplicate": (
        "stages.deduplicate", "passes.deduplicate", "duplicates.lsh", "duplicates.near_duplicates", "fast.minhash",
    ),
    "decontaminate": ("stages.decontaminate", "contamination.decontaminate", "contamination.words"),
}  # fmt: skip
"""First modules of what a build may do without, below `data_pipeline`; without it they do not count."""
ROOTS = OPTIONAL | {
    "source": ("passes.prepare", "reading.sources"),
    "measure": ("passes.measure",),
    "select": ("passes.selection",),
    "gather": ("passes.gather",),
    "publish": ("pipeline", "publish"),
    "overlap": ("passes.overlap",),
    "import": ("imported",),
}
"""First modules of each part of a build. A filter has its own module in `stages`."""
TABLES, TABLE_KINDS = "pyarrow", frozenset({"parquet", "arrow"})
LIBRARIES = ("ftfy", "langdetect", "tokenizers", "fastokens", "datasketch", "orjson")
"""Libraries whose answers are in the bytes of a dataset, beside the one that reads tables."""
GENERATOR = "numpy.random"
SETTING, INPUT = "setting", re.compile(r"(source \d+ |test set |tokenizer$)")
"""First part of the key of a setting; how the keys of inputs begin."""


def made_by(parts: Iterable[str], kinds: Collection[str] = ()) -> dict[str, str]:
    """Digests of the code of parts of a build in order, and of their libraries, by keys such as `clean: ftfy`.

    A module and a library count for the first part that needs them. `kinds` are those of files that are read.
    """
    parts = tuple(parts)
    known, called = {*SILENT}, set[str]()
    facts = {f"{parts[0]}: Unicode": unicodedata.unidata_version}
    with _summaries() as summary_of:
        for part in parts:
            doors = known | {*_modules(OPTIONAL.keys() - {part})}
            modules, libraries = _reach(_modules([part]), doors, summary_of)
            known |= modules.keys()
            if modules:
                facts[f"{part}: code"] = sha256_json(modules)
            if part == parts[0] and not TABLE_KINDS.isdisjoint(kinds):
                libraries.add(TABLES)
            facts |= {f"{part}: {name}": _library(name) for name in sorted(libraries - called)}
            called |= libraries
    return facts


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Differences between two builds in words; the keys are those of `made_by`, of inputs and of settings."""
    said, code = list[str](), list[str]()
    for key in [key for key in {**new, **old} if old.get(key) != new.get(key)]:
        before, now = old.get(key), new.get(key)
        part, _, what = key.rpartition(": ")
        if INPUT.match(key):
            said.append(f"{key}, which is {'other content' if before and now else 'in one of them alone'}")
        elif part == SETTING:
            said.append(f"{what} = {before or 'its default'} → {now or 'its default'}")
        elif before and now and what == "code":
            code.append(part)
        elif before and now:
            was, number = before.split()[0], now.split()[0]
            said.append(f"{what} {f'{was} → {number}' if was != number else f'{was} with other files'} ({part})")
    whole = [f"the code of {', '.join(code)}"] if code else []
    return said + whole or ["code and libraries, which are not recorded"]


def task_made_by(module: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the code and the libraries of a task by the module of its work and its settings.

    `filters` in the settings are pairs that begin with the names of filters, `pieces` are what it reads, and what
    OPTIONAL names is not done where a setting of that name says so.
    """
    filters = tuple(name for name, *_ in settings.get("filters", ()))
    without = frozenset(name for name in OPTIONAL if not settings.get(name, True))
    kinds = frozenset(piece.kind for piece in settings.get("pieces", ()))
    return _task_made_by(module.removeprefix(PACKAGE), filters, without, kinds)


@cache
def _task_made_by(
    module: str, filters: tuple[str, ...], without: frozenset[str], kinds: frozenset[str]
) -> dict[str, str]:  # fmt: skip
    roots = {module, *_modules(filters)}
    doors = {*SILENT, *_modules([*without, "hub", "installed-docs"])} - roots
    with _summaries() as summary_of:
        modules, libraries = _reach(roots, doors, summary_of)
    facts = {name: _library(name) for name in libraries | ({TABLES} if kinds & TABLE_KINDS else set())}
    return modules | facts | {"Unicode": unicodedata.unidata_version}


def _modules(parts: Iterable[str]) -> list[str]:
    return [f"data_pipeline.{root}" for part in parts for root in ROOTS.get(part, (f"stages.{part}",))]


def _reach(
    roots: Iterable[str], doors: Collection[str], summary_of: Callable[[Path], Any]
) -> tuple[dict[str, str], set[str]]:  # fmt: skip
    """Digests of modules from `roots` on, and the libraries that they import; `doors` are modules not to enter."""
    waiting, modules, libraries = [*roots], dict[str, str](), set[str]()
    while waiting:
        module = waiting.pop()
        path = _path_of(module)
        if path and module not in doors and module not in modules:
            modules[module], imports = summary_of(Path(path))
            ours = [each.removeprefix(PACKAGE) for each in imports if each.startswith(PACKAGE)]
            waiting += [each if _path_of(each) else each.rpartition(".")[0] for each in ours]
            libraries |= {GENERATOR} & {*imports} | {each.partition(".")[0] for each in imports} & {*LIBRARIES}
    return modules, libraries | ({GENERATOR} if "datasketch" in libraries else set())


def _summaries() -> AbstractContextManager[Callable[[Path], Any]]:
    made_of = f"{sys.version_info[:2]} {stamp_of(Path(__file__))}"
    return answers_on_files(f"code-{_short(str(HOME))}", made_of, summary)


def _short(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


@cache
def _path_of(module: str) -> str:
    """File of a module of this package, "" if there is none of that name."""
    place = os.path.join(HOME, *module.split("."))
    return next(filter(os.path.isfile, (f"{place}.py", os.path.join(place, "__init__.py"))), "")


def summary(path: Path) -> tuple[str, list[str]]:
    """Digest of a module's code, and the dotted names of all that it imports."""
    tree, imports, errors = ast.parse(path.read_bytes()), set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imports.update(f"{node.module}.{alias.name}" for alias in node.names)
            errors.update(alias.name for alias in node.names if node.module == f"{PACKAGE}{ERRORS}")
        elif isinstance(node, ast.Attribute) and node.attr == "random" and ast.unparse(node) == "np.random":
            imports.add(GENERATOR)
    return hashlib.sha256("\0".join(_shape(tree, errors)).encode("utf-8", "surrogatepass")).hexdigest(), sorted(imports)


def _shape(node: object, errors: set[str]) -> Iterator[str]:
    """The syntax tree as texts, without docstrings, what is printed, and the sentences of `errors`."""
    if isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _is_call(node.value, {"print"})):
        return
    if isinstance(node, ast.Raise) and _is_call(node.exc, errors):
        yield "raise"
    elif isinstance(node, ast.AST):
        yield type(node).__name__
        for name, value in ast.iter_fields(node):
            if value not in (None, []):  # what only a newer Python has is not there where the code does not use it
                yield name
                yield from _shape(value, errors)
    elif isinstance(node, list):
        yield "["
        for each in node:
            yield from _shape(each, errors)
        yield "]"
    else:
        yield repr(node)


def _is_call(node: object, names: Collection[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


@cache
def _library(name: str) -> str:
    """Version of a library, for people, and a digest of its files; of numpy's generator one of what it gives."""
    if name == GENERATOR:
        import numpy as np

        return _short(np.random.RandomState(1234).permutation(1000).astype("<i8").tobytes())
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return "absent"
    place = Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
    files = sorted(path for path in (place.rglob("*") if place.is_dir() else [place])
                   if "__pycache__" not in path.parts and path.is_file())  # fmt: skip
    with answers_on_files(f"library-{_short(str(place))}", "", sha256_file) as digest_of:
        content = {str(path.relative_to(place)): digest_of(path) for path in files}
    return f"{installed(name) or 'of no version'} {sha256_json(content)[:16]}"
