"""Files at `s3://`, `gs://`, `hf://`, `https://` and any other address that fsspec knows, read in
byte ranges.

A range that does not arrive is requested again, so that a broken connection resumes at the byte
where it broke.
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
"""Pauses in seconds before a failed request to a server is repeated, one for each repetition."""
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
"""Facts about a file, as servers name them, that change when its content does."""


class Remote:
    """Remote file or folder at an address with `://`. It has `name`, `suffix`, `stat` and `open` as
    a Path has, and `files` for what lies below it or matches its pattern.

    Its methods raise BadInput if it does not exist or cannot be read at all, ExtraMissing without
    the library that its protocol needs, Interrupted if the server does not answer.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = url.rstrip("/").rpartition("/")[2]
        self.suffix = Path(self.name).suffix

    def __str__(self) -> str:
        return self.url

    def _ask(self, method: str, **more: int) -> Any:
        """Call the method called `method` of fsspec's file system on this address and return its
        result; `more` are the `start` and `end` of a range of bytes. After an error, or if not as
        many bytes came as the range has, the method is called again after each of PAUSES_SECONDS;
        then Interrupted is raised. Raises BadInput at once if there is no such file or the address
        has an unknown protocol, ExtraMissing if a library is missing.

        The file system is looked up at each call, because every process needs one of its own.
        """
        import fsspec

        for pause in (*PAUSES_SECONDS, None):
            try:
                system, path = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
                answer = getattr(system, method)(path, **more)
                # A range that is too short is a connection that broke off.
                if "end" not in more or len(answer) == more["end"] - more["start"]:
                    return answer
                reason = (
                    f"{len(answer):,} bytes came for a range of {more['end'] - more['start']:,}"
                )
            except ImportError as error:
                raise ExtraMissing(
                    f"{self.url} needs a library that is not installed ({error}); for s3:// and"
                    f" gs:// it comes with {install_command('remote')}"
                ) from error
            except Exception as error:  # the file systems raise errors of many libraries
                # fsspec says so of an unknown protocol, and has no class of error for it.
                if isinstance(error, ValueError) and "rotocol" in str(error):
                    raise BadInput(
                        f"{self.url} is not an address that can be read, because a protocol in it,"
                        f" such as s3 in s3://, cannot be used: {error}; correct the address"
                    ) from error
                # fsspec's HTTP client raises FileNotFoundError for any failure of a connection too,
                # with the failure as its cause.
                if isinstance(error, FileNotFoundError) and isinstance(
                    error.__cause__, (FileNotFoundError, type(None))
                ):
                    raise BadInput(
                        f"{self.url}: there is no such file or folder at that address"
                    ) from error
                reason = str(error).partition("\n")[0] or type(error).__name__
            if pause is not None:
                time.sleep(pause)
        where = f"broke off at byte {more['start']:,}" if "end" in more else "does not answer"
        raise Interrupted(
            f"{self.url} {where}: {reason}, after {len(PAUSES_SECONDS) + 1} attempts; run the same"
            " command again, which keeps what was finished; if the server refuses it or gives no"
            " ranges, download it, and name the local file as the source"
        )

    def stat(self) -> SimpleNamespace:
        """Return an object with the fields `st_size`, the file's size in bytes; `st_ino`, in place
        of an inode a digest, a text, of the facts in MARKS that the server states; and
        `st_ctime_ns`, 0. If the server states none, only a new size shows a change. Raises BadInput
        if the server does not say the size, or there is no such file, and the other errors of
        Remote, such as Interrupted for a server that does not answer."""
        facts = self._ask("info")
        if facts.get("size") is None:
            raise BadInput(
                f"{self.url}: the server does not say the file's size, without which it is not"
                " read; download it, and name the local file as the source"
            )
        mark = sha256_json([str(facts.get(name)) for name in MARKS])
        return SimpleNamespace(st_ino=mark, st_size=int(facts["size"]), st_ctime_ns=0)

    def open(self, mode: str = "rb", buffering: int = RANGE_BYTES) -> BinaryIO:
        """Return the remote file, opened for reading, as a binary stream, whose bytes are requested
        as they are read, `buffering` bytes ahead. `mode` must be "rb". Opening and reading raise
        BadInput if there is no such file, Interrupted if the server does not answer, ExtraMissing
        without a library that the address needs; opening also BadInput if the server does not state
        the file's size."""
        import fsspec

        file = fsspec.spec.AbstractBufferedFile(
            None, self.url, mode, buffering, size=self.stat().st_size
        )
        file.cache.fetcher = lambda start, end: self._ask("cat_file", start=start, end=end)
        return io.BufferedReader(file, buffering or io.DEFAULT_BUFFER_SIZE)

    def files(self) -> list[tuple[str, "Remote"]]:
        """Return a list of pairs, the name and Remote of the file at this Remote's address, or of
        all files that match the address as a pattern, with `*`, or lie below it as a folder, in
        order of address. Names are paths below the address, or below the folder before a pattern; a
        file at the address itself is named by the address's last part. The list is empty if nothing
        matches a pattern or a folder has no files; without a pattern BadInput is raised if nothing
        is at the address. Raises the other errors of Remote too."""
        import fsspec

        if "*" in self.url:
            root = self.url.partition("*")[0].rpartition("/")[0]
            matches = self._ask("glob", detail=True)
            paths = [path for path, info in matches.items() if info["type"] == "file"]
        elif self._ask("info")["type"] != "file" or self.url.endswith("/"):
            root = self.url
            paths = self._ask("find")
        else:
            return [(self.name, self)]
        with_protocol = fsspec.core.url_to_fs(self.url)[0].unstrip_protocol
        return [
            (url.removeprefix(root).lstrip("/"), Remote(url))
            for url in map(with_protocol, sorted(paths))
        ]


def place_of(path: str) -> Path | Remote:
    """Return the text `path` as a Remote if it has `://` in it, else as a Path. Nothing is looked
    up."""
    return Remote(path) if "://" in path else Path(path)
