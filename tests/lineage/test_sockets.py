"""Every verb that opens a socket listens to this machine alone, unless a job says where its ranks
meet.

Which verbs do is read off the code: those from whose function a call leads to one that opens a
socket.
"""

import ast
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from os import readlink
from pathlib import Path

import pytest

from tests.architecture.rooms import PACKAGE, ROOMS, module_name, modules
from tests.commands import Program
from tests.data_pipeline.conftest import sentences
from tests.engine.conftest import write_dataset
from tests.engine.small_run import write_toml

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
COMMANDS: dict[str, tuple[set[Function], int, str]] = {
    "mlm-train run": ({LAUNCH, JOIN}, 2, "small.toml --ranks 2 --runs {}"),
    "mlm-verify parallel": ({FORKED}, 2, "small.toml --layouts tp2 --iterations 400"),
    "mlm-verify layouts": ({FORKED, MEGATRON}, 2, "megatron-core --layouts tp2"),
    "mlm-data clean": ({RAY}, 1, "text:texts {}/clean --executor ray --set workers=1"),
}
"""A verb for each door: the doors that it goes through, the fewest sockets that it opens, and what
it is given."""


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


def verbs() -> Iterator[tuple[str, set[Function]]]:
    """Each verb of each program, with its doors."""
    for script in entry_points(group="console_scripts"):
        if script.value.startswith(PACKAGE):
            module = script.value.partition(":")[0]
            for command in import_module(module).app.registered_commands:
                name = command.name or command.callback.__name__.replace("_", "-")
                yield f"{script.name} {name}", doors_of((module, command.callback.__name__))


def test_every_verb_that_opens_a_socket_does_it_through_a_door_that_is_watched() -> None:
    """The doors of all verbs, and of all code, are those below; a new one has to be watched too."""
    opening = {verb: doors for verb, doors in verbs() if doors}
    assert len(opening) > 10
    assert set().union(*opening.values()) <= {*DOORS}
    everywhere = {
        (module.removeprefix(f"{PACKAGE}."), name)
        for (module, name), (_, plain) in calls().items()
        if plain & OPENS
    }
    assert everywhere == {*DOORS} - {RAY}
    assert set().union(*(doors for doors, *_ in COMMANDS.values())) == {*DOORS}
    for verb, (doors, *_) in COMMANDS.items():
        assert doors - {RAY} <= opening.get(verb, set()), verb


def tree(process: int) -> Iterator[int]:
    """A process and all below it."""
    yield process
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            yield from tree(child)


def listening(process: int) -> set[str]:
    """Addresses, in hexadecimal, at which a process or one below it listens."""
    inodes = set()
    with suppress(OSError):
        for each in tree(process):
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


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_verb_listens_to_this_machine_alone(verb: str, tmp_path: Path) -> None:
    doors, least, words = COMMANDS[verb]
    pytest.importorskip("torch")
    if RAY in doors:
        pytest.importorskip("ray")
    if MEGATRON in doors:
        pytest.importorskip("megatron.core")
    write_toml(tmp_path / "small.toml", write_dataset(tmp_path / "dataset"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(sentences(200, 1), encoding="utf-8")
    program, name = verb.split()
    process, seen = (
        Program(program, name, *words.format(tmp_path).split(), folder=tmp_path),
        set[str](),
    )
    try:
        until = time.monotonic() + 400
        while len(seen) < least and process.poll() is None and time.monotonic() < until:
            seen |= listening(process.pid)
            time.sleep(0.02)
        for _ in range(100):  # what comes after the first
            seen |= listening(process.pid)
            time.sleep(0.02)
    finally:
        process.kill()
    assert len(seen) >= least, process.err
    assert [address for address in seen if not is_local(address)] == []
