"""English that operating systems have: handbooks, manuals and FAQs below the folders of documentation."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from data_pipeline.reading.config import OS_DOCS
from data_pipeline.reading.extract import Place
from data_pipeline.reading.harvested import HarvestedSource
from lineage.digest import sha256_json
from lineage.errors import DataMissing

FOLDERS = (Path("/usr/share/doc"), Path("/usr/share/info"), Path("/usr/local/share/doc"))
INSTALL = (
    "apt-get install debian-handbook debian-reference-en debian-faq doc-debian developers-reference debian-policy "
    "bash-doc"
)
WANTED = re.compile(r"(.+\.(txt|md|rst|html?|info(-\d+)?)|(readme|faq|news)(\.debian)?)(\.gz)?", re.IGNORECASE)
UNWANTED = re.compile(r"copyright|licen[cs]e|copying|authors|change|history|requirements", re.IGNORECASE)
LICENCE = re.compile(r"\AFormat:[\s\S]*?^License:[ \t]*(\S.*)", re.MULTILINE)
MOST_OF_A_COPYRIGHT = 1 << 16


class OsDocs(HarvestedSource):
    """Text, HTML and GNU info in order of package and path, but for changelogs and legal texts.

    A document's id is `PACKAGE (LICENCE):PATH`; the licence is the first that the package's copyright file names.
    """

    name = OS_DOCS
    typical_bytes = 40_000_000

    @cached_property
    def places(self) -> list[Place]:
        """Raises DataMissing if there are none."""
        if places := sorted(place for folder in FOLDERS for place in _files_below(folder)):
            return places
        looked = ", ".join(map(str, FOLDERS))
        raise DataMissing(f"there is no documentation below {looked}; on Debian, as root: {INSTALL}")

    def fingerprint(self) -> str:
        status = ((owner, inside, path.stat()) for owner, inside, path in self.places)
        return sha256_json([[owner, inside, each.st_size, each.st_mtime_ns] for owner, inside, each in status])

    def describe(self) -> str:
        packages = len({owner for owner, _, _ in self.places})
        return f"{self.name}: documentation of {packages} packages of the operating system{self._sample}"


def _files_below(root: Path) -> Iterator[Place]:
    """Files that are wanted; links are followed to what lies beside the folder, each thing once, and no further."""
    share, folders, seen = os.path.realpath(root.parent), [root], {os.path.realpath(root)}
    while folders:
        with suppress(OSError):  # a folder that may not be read
            for path in sorted(folders.pop().iterdir()):
                real = os.path.realpath(path)
                if real in seen or not real.startswith(f"{share}/"):
                    continue
                seen.add(real)
                if path.is_dir():
                    folders.append(path)
                elif path.is_file() and WANTED.fullmatch(path.name) and not UNWANTED.match(path.name):
                    inside = path.relative_to(root)
                    package = inside.parts[0].partition(".info")[0]
                    yield f"{package} ({_licence_of(package)})", inside.as_posix(), path


def _licence_of(package: str) -> str:
    with suppress(OSError), (FOLDERS[0] / package / "copyright").open("rb") as file:
        if named := LICENCE.match(file.read(MOST_OF_A_COPYRIGHT).decode("utf-8", "replace")):
            return named[1].strip()
    return "unknown"
