"""English that every installation has: the documentation inside Python and its installed packages.

Only the standard library and the distributions that this package needs to run are read, so the corpus does not
depend on what else is installed. Nothing is imported, and Python files are not parsed.
"""

import os
import platform
import re
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement

from data_pipeline.reading.config import INSTALLED_DOCS
from data_pipeline.reading.extract import Place
from data_pipeline.reading.harvested import HarvestedSource
from lineage.digest import sha256_json
from lineage.errors import DataMissing

PACKAGE = "mlm-repro"
TEXT_SUFFIXES = (".md", ".rst", ".txt")
UNWANTED = re.compile(r"(licen[cs]e|copying|notice|authors|change|history|third)", re.IGNORECASE)
TEST_FOLDERS = {"test", "tests"}
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__")


class InstalledDocs(HarvestedSource):
    """Strings and comments in Python, package descriptions and manuals, in order of distribution and path.

    Python comes last.
    """

    name = INSTALLED_DOCS
    typical_bytes = 60_000_000

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
