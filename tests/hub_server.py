"""A small hub on 127.0.0.1 for the real clients: repositories as folders, one commit each, and
faults on demand."""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".parquet", ".bin")
"""What the hub keeps by its SHA-256."""


@dataclass
class Hub:
    """Folders `models/OWNER/NAME` and `datasets/OWNER/NAME` below a root, served."""

    root: Path
    url: str = ""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and Range of each request."""
    cut_after: dict[str, int] = field(default_factory=dict)
    """Files whose first answer ends after so many bytes."""
    busy: Counter[str] = field(default_factory=Counter)
    """Requests for paths that contain a text, which get 429 so many times."""
    damaged: set[str] = field(default_factory=set)
    """Files whose last byte is another one on the way."""
    gated: set[str] = field(default_factory=set)
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})

    @property
    def environment(self) -> dict[str, str]:
        """Variables under which a client asks this hub."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HOME": str(self.root / "cache"),
        }


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def describe(path: Path, folder: Path) -> dict[str, Any]:
    """A file or a folder as the hub's listings have it."""
    if path.is_dir():
        return {
            "type": "directory",
            "path": path.relative_to(folder).as_posix(),
            "oid": "0" * 40,
            "size": 0,
        }
    entry: dict[str, Any] = {
        "type": "file",
        "path": path.relative_to(folder).as_posix(),
        "oid": digest(path)[:40],
        "size": path.stat().st_size,
    }
    if path.suffix in LARGE:
        entry["lfs"] = {"oid": digest(path), "size": path.stat().st_size, "pointerSize": 134}
    return entry


class Handler(BaseHTTPRequestHandler):
    """The part of the hub's API that downloads use."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        """As GET, without the content."""
        self.do_GET()

    def do_GET(self) -> None:
        """A file, a listing or a description."""
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        for text, times in self.hub.busy.items():
            if text in path and times > 0:
                self.hub.busy[text] -= 1
                self.error(429, "", "Too many requests")
                return
        if path == "/":
            self.send_json({})
        elif match := re.fullmatch(
            r"/api/(models|datasets)/([^/]+(?:/(?!revision/|tree/)[^/]+)?)(/.*)?", path
        ):
            what, revision, below = (*(match[3] or "").strip("/").split("/", 2), "", "", "")[:3]
            if self.known(match[1], match[2], revision or "main"):
                self.describe(match[1], match[2], what, revision or "main", below)
        elif match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            kind = (match[1] or "models").strip("/")
            if self.known(kind, match[2], match[3]):
                self.resolve(self.hub.root / kind / match[2], match[3], match[4])
        else:
            self.error(404, "", "nothing is there")

    def known(self, kind: str, repository: str, revision: str) -> bool:
        """Whether the repository and its revision are there and open; otherwise the error is
        sent."""
        if repository in self.hub.gated:
            self.error(
                403,
                "GatedRepo",
                f"Access to model {repository} is restricted and you are not in the list",
            )
        elif not (self.hub.root / kind / repository).is_dir():
            self.error(404 if kind == "datasets" else 401, "RepoNotFound", "Repository not found")
        elif revision not in {*self.hub.revisions, *self.hub.revisions.values()}:
            self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return True
        return False

    def describe(self, kind: str, repository: str, what: str, revision: str, below: str) -> None:
        """A repository, or the files in one of its folders."""
        folder = self.hub.root / kind / repository
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        if what == "tree":
            inside = [path for path in files if path.is_relative_to(folder / below)]
            tops = {path.relative_to(folder / below).parts[0] for path in inside}
            folders = [
                folder / below / top for top in sorted(tops) if (folder / below / top).is_dir()
            ]
            if "recursive=true" not in self.path.lower():
                inside = [path for path in inside if path.parent == folder / below]
            self.send_json([describe(path, folder) for path in folders + inside])
            return
        siblings = []
        for path in files:
            entry = describe(path, folder)
            lfs = {"lfs": {"sha256": entry["lfs"]["oid"], **entry["lfs"]}} if "lfs" in entry else {}
            siblings.append({"rfilename": entry["path"], "size": entry["size"], **lfs})
        self.send_json(
            {
                "_id": "1",
                "id": repository,
                "sha": self.hub.revisions.get(revision, revision),
                "private": False,
                "gated": False,
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "siblings": siblings,
                "lastModified": "2024-01-01T00:00:00.000Z",
                "createdAt": "2024-01-01T00:00:00.000Z",
            }
        )

    def resolve(self, folder: Path, revision: str, name: str) -> None:
        """A file, or a part of it."""
        path = folder / name
        if not path.is_file():
            self.error(404, "EntryNotFound", "Entry not found")
            return
        content, status, first = path.read_bytes(), 200, 0
        size = len(content)
        if match := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            first = int(match[1]) if match[1] else max(size - int(match[2]), 0)
            last = int(match[2]) if match[1] and match[2] else size - 1
            if first >= size > 0:
                self.error(416, "", "no such range")
                return
            content, status = content[first : last + 1], 206
        self.send_response(status)
        tag = digest(path) if path.suffix in LARGE else digest(path)[:40]
        headers = {
            "X-Repo-Commit": self.hub.revisions.get(revision, revision),
            "ETag": f'"{tag}"',
            "Content-Length": str(len(content)),
            "Accept-Ranges": "bytes",
            "Last-Modified": formatdate(0, usegmt=True),
        }
        if path.suffix in LARGE:
            headers |= {"X-Linked-Etag": f'"{tag}"', "X-Linked-Size": str(size)}
        if status == 206:
            headers["Content-Range"] = f"bytes {first}-{first + len(content) - 1}/{size}"
        for header, value in headers.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command != "HEAD":
            if name in self.hub.damaged:
                content = content[:-1] + bytes([content[-1] ^ 1])
            limit = self.hub.cut_after.pop(name, None)
            self.wfile.write(content[:limit])
            if limit is not None:
                self.wfile.flush()
                self.close_connection = True

    def send_json(self, content: Any) -> None:
        """An answer."""
        self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def error(self, status: int, code: str, text: str) -> None:
        """A refusal as the hub's clients know it."""
        headers = {"X-Error-Code": code, "X-Error-Message": text} if code else {"Retry-After": "0"}
        self.send(
            status,
            json.dumps({"error": text}).encode(),
            {"Content-Type": "application/json", **headers},
        )

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        """Everything at once."""
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    """A hub while the block lasts."""
    hub = Hub(root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OfThisHub", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
