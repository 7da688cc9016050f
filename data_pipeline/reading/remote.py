"""Files that lie elsewhere, at `s3://`, `gs://`, `hf://`, `https://` and what else fsspec knows,
read in byte ranges.

What does not come is asked for again, so a connection that breaks is resumed where it broke.
"""

import io
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from mlm_repro.lineage.digest import sha256_json
from mlm_repro.lineage.errors import BadInput, Interrupted
from mlm_repro.lineage.extras import ExtraMissing, install_command

RANGE_BYTES = 4 << 20
PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses before something is asked for again."""
MARKS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "blob_id",
    "Content-MD5",
    "Last-Modified",
    "LastModified",
    "mtime",
)
"""Facts of a file, as servers name them, that change when its content does."""


class Remote:
    """A file or a folder elsewhere, with what is used of a Path.

    Raises BadInput for what is not there or cannot be read at all, Interrupted for what does not
    come.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = url.rstrip("/").rpartition("/")[2]
        self.suffix = Path(self.name).suffix

    def __str__(self) -> str:
        return self.url

    def _ask(self, what: str, **more: int) -> Any:
        """The answer of a method of the file system, which each process has of its own."""
        import fsspec

        for pause in (*PAUSES_SECONDS, None):
            try:
                system, path = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
                answer = getattr(system, what)(path, **more)
                if not more or len(answer) == more["end"] - more["start"]:
                    return answer
                said = f"{len(answer):,} bytes came for a range of {more['end'] - more['start']:,}"
            except ImportError as error:
                raise ExtraMissing(
                    f"{self.url} needs a library: {install_command('remote')} ({error})"
                ) from error
            except Exception as error:  # the file systems raise errors of many libraries
                if isinstance(error, ValueError) and "rotocol" in str(error):
                    raise BadInput(
                        f"{self.url} is not at a place that can be read: {error}"
                    ) from error
                if isinstance(error, FileNotFoundError) and isinstance(
                    error.__cause__, (FileNotFoundError, type(None))
                ):
                    raise BadInput(f"{self.url}: there is no such file") from error
                said = str(error).partition("\n")[0] or type(error).__name__
            if pause is not None:
                time.sleep(pause)
        where = f"broke off at byte {more['start']:,}" if more else "does not answer"
        again = f"asked for {len(PAUSES_SECONDS) + 1} times; the same command goes on"
        raise Interrupted(f"{self.url} {where}: {said}, {again}")

    def stat(self) -> SimpleNamespace:
        """Size, and in place of the inode a digest of what the server says of the version."""
        facts = self._ask("info")
        if facts.get("size") is None:
            raise BadInput(f"{self.url}: the server does not say its size; fetch the file first")
        mark = sha256_json([str(facts.get(name)) for name in MARKS])
        return SimpleNamespace(st_ino=mark, st_size=int(facts["size"]), st_ctime_ns=0)

    def open(self, mode: str = "rb", buffering: int = RANGE_BYTES) -> BinaryIO:
        """The bytes of the file, fetched as they are read, `buffering` more than are wanted."""
        import fsspec

        file = fsspec.spec.AbstractBufferedFile(
            None, self.url, mode, buffering, size=self.stat().st_size
        )
        file.cache.fetcher = lambda start, end: self._ask("cat_file", start=start, end=end)
        return io.BufferedReader(file, buffering or io.DEFAULT_BUFFER_SIZE)

    def files(self) -> list[tuple[str, "Remote"]]:
        """Name and place of the file itself, or of all files that match its pattern or lie below
        it, in order."""
        import fsspec

        if "*" in self.url:
            root = self.url.partition("*")[0].rpartition("/")[0]
            paths = self._ask("glob")
        elif self._ask("info")["type"] != "file" or self.url.endswith("/"):
            root = self.url
            paths = self._ask("find")
        else:
            return [(self.name, self)]
        whole = fsspec.core.url_to_fs(self.url)[0].unstrip_protocol
        return [
            (url.removeprefix(root).lstrip("/"), Remote(url)) for url in map(whole, sorted(paths))
        ]


def place_of(path: str) -> Path | Remote:
    """The file at a path or an address."""
    return Remote(path) if "://" in path else Path(path)
