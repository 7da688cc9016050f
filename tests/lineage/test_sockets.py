"""Every verb that opens a socket listens to this machine alone, unless a job says where its ranks
meet.

Which verbs do is read off the code: those from whose function a call leads to one that opens a
socket.
"""

import ast
import socket
import sys
import time
from contextlib import suppress
from functools import cache
from os import readlink
from pathlib import Path

import pytest

from tests.architecture.rooms import PACKAGE, ROOMS, module_name, modules
from tests.commands import Program
from tests.lineage.every_verb import ENDS, LONG, WORK, every_verb, prepare, start
from tests.processes import tree

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="sockets of a process are read in /proc"
)

OPENS = {
    "TCPStore",
    "init_process_group",
    "listen",
    "create_server",
    "HTTPServer",
    "ThreadingHTTPServer",
}
"""Names of what opens a socket that others can reach."""
Function = tuple[str, str]
"""A module and the name of a function or class in it."""
LAUNCH, JOIN, FORKED, MEGATRON, RAY = DOORS = (
    ("engine.launch.local", "launch"),
    ("engine.launch.mesh", "join_ranks"),
    ("engine.launch.forked", "_enter"),
    ("verify.megatron_core", "build"),
    ("data_pipeline.work.executors.ray", "RayExecutor"),
)
"""All that opens one; the last by a library, at its `init`."""
OPENING = {
    "mlm-train run": ({LAUNCH, JOIN}, 2),
    "mlm-verify parallel": ({FORKED}, 2),
    "mlm-verify layouts": ({FORKED, MEGATRON}, 2),
    "mlm-data clean": ({RAY}, 1),
}
"""A verb for each door: the doors that it goes through, and the fewest sockets that it opens."""


@cache
def calls() -> dict[Function, tuple[set[Function], set[str]]]:
    """Functions and classes of this package: those whose names each uses, and all names in it."""
    found = {}
    for path in (path for room in ROOMS for path in modules(room)):
        module, tree = module_name(path), ast.parse(path.read_text(encoding="utf-8"))
        names = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {
                    alias.asname or alias.name: (node.module, alias.name) for alias in node.names
                }
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                inner = list(ast.walk(node))
                used = {
                    names.get(each.id, (module, each.id))
                    for each in inner
                    if isinstance(each, ast.Name)
                }
                used |= {
                    (".".join(names[each.value.id]), each.attr)
                    for each in inner
                    if isinstance(each, ast.Attribute)
                    and isinstance(each.value, ast.Name)
                    and each.value.id in names
                }
                plain = {
                    each.attr if isinstance(each, ast.Attribute) else each.id
                    for each in inner
                    if isinstance(each, ast.Attribute | ast.Name)
                }
                found[module, node.name] = used, plain
    return found


def doors_of(begin: Function) -> set[Function]:
    """What a function leads to that opens a socket."""
    seen, todo = set[Function](), [begin]
    while todo:
        if (each := todo.pop()) in calls() and each not in seen:
            seen.add(each)
            todo += calls()[each][0]
    return {
        (module.removeprefix(f"{PACKAGE}."), name)
        for module, name in seen
        if calls()[module, name][1] & OPENS
    }


def test_every_verb_that_opens_a_socket_does_it_through_a_door_that_is_watched() -> None:
    """The doors of all verbs, and of all code, are those below; a new one has to be watched too."""
    leading = {verb: doors_of((module, name)) for verb, module, name in every_verb()}
    assert leading.keys() == WORK.keys()
    opening = {verb: doors for verb, doors in leading.items() if doors}
    assert len(opening) > 10
    assert set().union(*opening.values()) <= {*DOORS}
    everywhere = {
        (module.removeprefix(f"{PACKAGE}."), name)
        for (module, name), (_, plain) in calls().items()
        if plain & OPENS
    }
    assert everywhere == {*DOORS} - {RAY}
    assert set().union(*(doors for doors, _ in OPENING.values())) == {*DOORS}
    for verb, (doors, _) in OPENING.items():
        assert doors - {RAY} <= opening.get(verb, set()), verb


def listening(process: int) -> set[str]:
    """Addresses, in hexadecimal, at which a process or one below it listens."""
    inodes = set()
    for each in tree(process):
        with suppress(OSError):
            for descriptor in Path(f"/proc/{each}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    rows = [
        row.split()
        for table in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in inodes}


MAPPED = "0000000000000000FFFF0000"
"""An address of IPv4 in the form of IPv6, without its last part."""


def is_local(address: str) -> bool:
    """True for 127.0.0.0/8, ::1, and the former in the latter's form."""
    host = address.partition(":")[0]
    return (
        host.endswith("7F") and host[:-8] in ("", "0000000000000000FFFF0000")
    ) or host == f"{'0' * 24}01000000"


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("0100007F", True),
        (f"{MAPPED}0100007F", True),
        (f"{'0' * 24}01000000", True),
        ("00000000", False),
        ("0" * 32, False),
        ("0200000A", False),
        (f"{MAPPED}0200000A", False),
    ],
)
def test_what_listens_everywhere_is_not_local(address: str, local: bool) -> None:
    assert is_local(f"{address}:1F90") is local


def opened(process: Program, least: int, seconds: float = 400) -> set[str]:
    """Addresses at which a command listens until it has ended, for at most so many seconds, or for
    two after the first `least`, by when all that it opens are there; it is ended then."""
    seen, until = set[str](), time.monotonic() + seconds
    try:
        while process.poll() is None and time.monotonic() < until:
            seen |= listening(process.pid)
            if least and len(seen) >= least:
                until = min(until, time.monotonic() + 2)
            time.sleep(0.01)
    finally:
        process.kill()
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the verbs read."""
    pytest.importorskip("torch")
    return prepare(tmp_path_factory.mktemp("verbs"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("verb", [verb for verb in WORK if verb not in OPENING])
def test_every_other_verb_listens_to_this_machine_alone(verb: str, folder: Path) -> None:
    process = start(verb, folder)
    seen = opened(process, 0, LONG.get(verb, 1500))
    assert [address for address in seen if not is_local(address)] == []
    if verb not in LONG:
        assert process.wait() == ENDS.get(verb, 0), process.err


@pytest.mark.parametrize("verb", OPENING)
def test_a_verb_that_opens_sockets_listens_to_this_machine_alone(verb: str, folder: Path) -> None:
    doors, least = OPENING[verb]
    if RAY in doors:
        pytest.importorskip("ray")
    if MEGATRON in doors:
        pytest.importorskip("megatron.core")
    process = start(verb, folder, *(("--executor", "ray") if RAY in doors else ()))
    seen = opened(process, least)
    assert len(seen) >= least, process.err
    assert [address for address in seen if not is_local(address)] == []


def listen_everywhere() -> None:
    """Open a socket that other machines reach, for as long as this process lives."""
    OPEN.append(socket.create_server(("0.0.0.0", 0)))
    time.sleep(0.5)


OPEN: list[socket.socket] = []


def test_a_socket_that_others_reach_is_seen(folder: Path) -> None:
    seen = opened(start("mlm-eval list", folder, first=listen_everywhere), 0)
    assert [address for address in seen if not is_local(address)]
