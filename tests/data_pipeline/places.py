"""Servers of files, each a program or a thread of its own: S3's protocol, and HTTP with faults."""

import http.server
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.ports import held_port

BUCKET = "corpus"


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """The address of a server, a process of its own, whose one bucket has the files of a folder."""
    with held_port() as port:
        url = f"http://127.0.0.1:{port}"
        program = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_for(port)
            import boto3

            client = boto3.client("s3", endpoint_url=url, region_name="us-east-1")
            client.create_bucket(Bucket=BUCKET)
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                client.upload_file(str(path), BUCKET, path.relative_to(folder).as_posix())
            yield url
        finally:
            program.terminate()
            program.wait()


def _wait_for(port: int) -> None:
    for _ in range(600):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError("the server did not start")


class Faulty(http.server.SimpleHTTPRequestHandler):
    """Serves byte ranges of the files of a folder; every `breaks_each`-th answer ends half-way."""

    answers = 0
    breaks_each = 0
    has_ranges = True
    asked: list[tuple[int, int]] = []  # noqa: RUF012  # one list of all requests, which the test reads
    lock = threading.Lock()

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not path.is_file() or not wanted or not self.has_ranges:
            super().do_GET()
            return
        start, end = int(wanted[1]), int(wanted[2]) + 1
        content = path.read_bytes()[start:end]
        with self.lock:
            Faulty.answers += 1
            is_broken = self.breaks_each > 0 and Faulty.answers % self.breaks_each == 0
            self.asked.append((start, end))
        self.send_response(206)
        self.send_header(
            "Content-Range", f"bytes {start}-{start + len(content) - 1}/{path.stat().st_size}"
        )
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if is_broken else content)
        if is_broken:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def http_server(folder: Path, breaks_each: int = 0, has_ranges: bool = True) -> Iterator[str]:
    """The address of a server whose connections break."""
    Faulty.answers, Faulty.breaks_each, Faulty.has_ranges = 0, breaks_each, has_ranges
    Faulty.asked.clear()
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Faulty, directory=os.fspath(folder))
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
