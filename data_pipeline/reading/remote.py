"""Files that lie elsewhere, at `s3://`, `gs://`, `hf://`, `https://` and what else fsspec knows, read in byte ranges.

A range that does not come is asked for again, so a connection that breaks is resumed where it broke.
"""

import io
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from mlm_repro.lineage.digest import sha256_json
from mlm_repro.lineage.errors import BadInput, DataMissing, Interrupted
from mlm_repro.lineage.extras import ExtraMissing, install_command

RANGE_BYTES = 8 << 20
PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses before a range is asked for again."""
MARKS = ("ETag", "etag", "version_id", "generation", "md5Hash", "blob_id", "Content-MD5", "Last-Modified", "mtime")
"""What servers say of a file that changes when its content does."""


class Remote:
    """A file or a folder elsewhere, with what is used of a Path. What a server does not give ends in one sentence."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = url.rstrip("/").rpartition("/")[2]
        self.suffix = Path(self.name).suffix

    def __str__(self) -> str:
        return self.url

    @property
    def _place(self) -> tuple[Any, str]:
        """The file system, one for each process and place, and the path in it."""
        import fsspec

        try:
            found: tuple[Any, str] = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except ImportError as error:
            raise ExtraMissing(f"{self.url} needs a library: {install_command('remote')} ({error})") from error
        except ValueError as error:
            raise BadInput(f"{self.url} is not at a place that can be read: {error}") from error
        return found

    def _asked(self, question: Callable[[Any, str], Any]) -> Any:
        """The answer of the file system. Raises BadInput for no such file, DataMissing if there is no answer."""
        try:
            return question(*self._place)
        except (BadInput, MemoryError):
            raise
        except Exception as error:  # the file systems raise errors of many libraries
            if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, (FileNotFoundError, type(None))):
                raise BadInput(f"{self.url}: there is no such file") from error
            raise DataMissing(f"{self.url} cannot be reached: {_said(error)}") from error

    @cached_property
    def _status(self) -> SimpleNamespace:
        return self._look()

    def _look(self) -> SimpleNamespace:
        facts = self._asked(lambda system, path: system.info(path))
        if facts.get("size") is None or facts.get("partial") is False:
            raise BadInput(f"{self.url}: the server gives no size or no byte ranges; fetch the file first")
        mark = sha256_json([str(facts.get(name)) for name in MARKS])
        return SimpleNamespace(st_ino=mark, st_size=int(facts["size"]), st_ctime_ns=0)

    def stat(self) -> SimpleNamespace:
        """Size, and in place of the inode a digest of what the server says of the version, asked for anew."""
        self._status = self._look()
        return self._status

    def resolve(self) -> "Remote":
        """The file itself."""
        return self

    def open(self, mode: str = "rb", buffering: int = -1) -> BinaryIO:
        """The bytes of the file, fetched as they are read."""
        raw: Any = _Ranges(self, self._status.st_size)
        return raw if buffering == 0 else io.BufferedReader(raw, RANGE_BYTES)

    def range(self, start: int, end: int) -> bytes:
        """Bytes from `start` to before `end`. Raises Interrupted if they do not come."""
        for pause in (*PAUSES_SECONDS, None):
            system, path = self._place
            try:
                content: bytes = system.cat_file(path, start=start, end=end)
                if len(content) == end - start:
                    return content
                if len(content) == self._status.st_size:
                    raise BadInput(f"{self.url}: the server gives no byte ranges; fetch the file first")
                said = f"{len(content):,} of {end - start:,} bytes came"
            except (BadInput, MemoryError):
                raise
            except Exception as error:  # the file systems raise errors of many libraries
                said = _said(error)
            if pause is not None:
                time.sleep(pause)
        again = f"asked for {len(PAUSES_SECONDS) + 1} times; the same command goes on"
        raise Interrupted(f"{self.url} broke off at byte {start:,}: {said}, {again}")

    def files(self) -> Iterator[tuple[str, "Remote"]]:
        """Name and place of the file itself, or of all files that match its pattern or lie below it, in order."""
        system, path = self._place
        is_file = "*" not in path and self._asked(lambda *at: at[0].info(at[1]))["type"] == "file"
        if "*" in path:
            root, found = path.partition("*")[0].rpartition("/")[0], self._asked(lambda *at: at[0].glob(at[1]))
        elif is_file and not self.url.endswith("/"):
            root, found = path.rpartition("/")[0], [path]
        else:
            root, found = path.rstrip("/"), self._asked(lambda *at: at[0].find(at[1]))
        for each in sorted(found):
            yield each.removeprefix(root).lstrip("/"), Remote(system.unstrip_protocol(each))


def place_of(path: str) -> Path | Remote:
    """The file at a path or an address."""
    return Remote(path) if "://" in path else Path(path)


class _Ranges(io.RawIOBase):
    """The bytes of a file elsewhere; each read asks for what it wants."""

    def __init__(self, remote: Remote, size: int) -> None:
        self._remote, self._size, self._position = remote, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._size)
        content = self._remote.range(self._position, end) if end > self._position else b""
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def _said(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
