"""Damage that keeps a file's structure: values of JSON, words, instructions of a pickle, what a
container holds."""

import copy
import gzip
import io
import json
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import zstandard

TOKEN = re.compile(rb'"[^"\n]*"|[\w.+-]+|[\[\]{}:,=\n]')
HOSTILE = (
    b"",
    b"\x00",
    b"\xff",
    b"\n",
    b"\r\n",
    b'"',
    b"{",
    b"}",
    b"null",
    b"true",
    b"[]",
    b"{}",
    b'""',
    b"-1",
    b"0",
    b"7",
    b"1e999",
    b"NaN",
    b"-Infinity",
    b"9" * 400,
    b"9" * 5000,
    b"0.5",
    b'"a"',
    b'"../x"',
    b'"/etc/passwd"',
    b'"\\ud800"',
    b'"\\u0000"',
    b"\xef\xbb\xbf",
    b"[" * 3000,
    b'{"a":' * 3000,
    b"a." * 3000 + b"a = 1\n",
    b"[[a]]\n",
    b'extends = "b\\u0000.toml"\n',
    b'extends = ""\n',
    b"x" * 70_000,
    b"\xff" * 4,
    b"\xff" * 8,
    b"\x00" * 8,
    b"\x00" * 7 + b"\x80",
    b"\xff" * 7 + b"\x7f",
    b"\x01" + b"\x00" * 7,
)
"""What is put in the place of a word, or of bytes: values of every other kind, and sizes that no
file has."""
VALUES = (
    None,
    True,
    False,
    0,
    1,
    -1,
    7,
    2**31,
    2**63,
    10**30,
    -(10**30),
    0.5,
    -0.5,
    1e-320,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "a",
    "0",
    "../x",
    "/etc/passwd",
    "\x00",
    "\ud800",
    "\x1b[2J",
    "x" * 70_000,
    "=1+1",
    "é" * 300,
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"a": {"a": {}}},
    [0] * 10_000,
    [[0, 0]] * 3,
)
"""What is put in the place of a value in JSON."""
OPCODES = (
    b"N",
    b"0",
    b"2",
    b"(",
    b"t",
    b"l",
    b"d",
    b"]",
    b"}",
    b")",
    b"R",
    b"b",
    b"\x81",
    b"u",
    b"e",
    b"s",
    b"a",
    b"K\x00",
    b"J\xff\xff\xff\xff",
    b"\x8a\x09" + b"\xff" * 9,
    b"X\x01\x00\x00\x00a",
    b"h\x00",
    b"q\x00",
    b"cbuiltins\neval\n",
    b"ctorch\nSize\n",
    b"ccollections\nOrderedDict\n",
    b"Q",
    b".",
    b"\x80\x05",
    b"\x8e" + b"\xff" * 8,
    b"B\xff\xff\xff\x7f",
    b"r\xff\xff\xff\x7f",
)
"""What is put in the place of an instruction of a pickle."""


class Form(NamedTuple):
    """How a file holds what is worth damaging."""

    open: Callable[[bytes], bytes]
    """What is inside a valid file."""
    close: Callable[[bytes, bytes], bytes]
    """The valid file with something else inside it."""
    spans: Callable[[bytes], list[tuple[int, int]]] = lambda data: [
        match.span() for match in TOKEN.finditer(data)
    ]
    """Where the words, or instructions, are."""
    contents: Sequence[bytes] = HOSTILE
    load: Callable[[bytes], Any] | None = None
    """The object that a whole file was made of, where that is no JSON."""
    dump: Callable[[Any], bytes] = pickle.dumps


def _instructions(data: bytes) -> list[tuple[int, int]]:
    starts = [0]
    with suppress(ValueError, IndexError):  # of what an earlier edit left
        starts += [place for _, _, place in pickletools.genops(data) if place is not None]
    return list(zip(starts, [*starts[1:], len(data)], strict=True))


def _with_header(valid: bytes, header: bytes) -> bytes:
    (length,) = struct.unpack_from("<Q", valid)
    return struct.pack("<Q", len(header)) + header + valid[8 + length :]


def _footer(table: bytes) -> tuple[int, int]:
    return len(table) - 8 - int(struct.unpack_from("<I", table, len(table) - 8)[0]), len(table) - 8


def _with_footer(valid: bytes, footer: bytes) -> bytes:
    return valid[: _footer(valid)[0]] + footer + struct.pack("<I", len(footer)) + b"PAR1"


def _pickled(archive: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(archive)) as parts:
        return next(parts.read(name) for name in parts.namelist() if name.endswith("/data.pkl"))


def _with_pickle(valid: bytes, pickled: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(valid)) as parts, zipfile.ZipFile(made, "w") as out:
        for name in parts.namelist():
            out.writestr(name, pickled if name.endswith("/data.pkl") else parts.read(name))
    return made.getvalue()


def _torch_object(whole: bytes) -> Any:
    return torch.load(io.BytesIO(whole), weights_only=False)


def _torch_file(value: Any) -> bytes:
    made = io.BytesIO()
    torch.save(value, made)
    return made.getvalue()


PLAIN = Form(lambda whole: whole, lambda valid, inside: inside)
GZIP = Form(gzip.decompress, lambda valid, inside: gzip.compress(inside, 1, mtime=0))
ZSTANDARD = Form(zstandard.decompress, lambda valid, inside: zstandard.compress(inside, 1))
SAFETENSORS = Form(lambda whole: whole[8 : 8 + struct.unpack_from("<Q", whole)[0]], _with_header)
PARQUET = Form(lambda whole: whole[slice(*_footer(whole))], _with_footer)
PICKLE = Form(PLAIN.open, PLAIN.close, _instructions, OPCODES, pickle.loads)
TORCH = Form(_pickled, _with_pickle, _instructions, OPCODES, _torch_object, _torch_file)


def damage(valid: bytes, script: bytes, form: Form = PLAIN) -> bytes:
    """The file after the edits of a script, four bytes for each: what to do, where, and with what.

    One script in four strikes the whole file, one the words inside it, two the values of JSON or of
    an object.
    """
    edits = list(zip(*[iter(script)] * 4, strict=False))
    if script[-1] % 4 == 0:
        return _edit(valid, edits, PLAIN)
    if script[-1] % 4 > 1 and form.load:
        objects = [form.load(valid)]
        _edit_values(objects, edits)
        with suppress(Exception):  # not every object that an edit leaves can be written
            return form.dump(objects[0] if objects else None)
    inside = form.open(valid)
    values = _values(inside) if script[-1] % 4 > 1 else None
    if values is None:
        return form.close(valid, _edit(inside, edits, form))
    _edit_values(values, edits)
    return form.close(valid, "\n".join(map(json.dumps, values)).encode())


def _edit(data: bytes, edits: Sequence[Sequence[int]], form: Form) -> bytes:
    for kind, high, low, which in edits:
        number, content = high << 8 | low, form.contents[which % len(form.contents)]
        words = form.spans(data)
        start, end = (
            words[number % len(words)] if words and kind < 160 else (number % (len(data) + 1),) * 2
        )
        match kind % 8:
            case 0 | 1 | 2:
                data = data[:start] + content + data[max(end, start + 1) :]
            case 3:
                data = data[:start] + content + data[start:]
            case 4:
                data = data[:start] + data[end + which % 16 :]
            case 5:
                data = data[:start]
            case 6:
                data = data[: start + 4 * which] + data[start:]
            case _:
                data = data[:start] + bytes([which]) + data[start + 1 :]
    return data


def _values(data: bytes) -> list[Any] | None:
    """The values of JSON, or of each line of it; None where it is none."""
    try:
        return [json.loads(data)]
    except (ValueError, RecursionError):
        try:
            return [json.loads(line) for line in data.splitlines() if line.strip()] or None
        except (ValueError, RecursionError):
            return None


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each list and mapping inside, attributes of an object being one, with each of its indices or
    keys."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        inner = value[key]
        if not isinstance(inner, dict | list | torch.Tensor | type) and hasattr(inner, "__dict__"):
            inner = vars(inner)
        if isinstance(inner, dict | list):
            yield from _places(inner)


def _edit_values(documents: list[Any], edits: Sequence[Sequence[int]]) -> None:
    for kind, high, low, which in edits:
        places = list(_places(documents))
        if not places:
            break
        inside, key = places[(high << 8 | low) % len(places)]
        other_inside, other = places[(which * 257) % len(places)]
        old = inside[key]
        match kind % 8:
            case 0 | 1 | 2:
                inside[key] = copy.deepcopy(VALUES[which % len(VALUES)])
            case 3:
                del inside[key]
            case 4:
                inside[key] = copy.deepcopy(other_inside[other])
            case 5:
                inside[key] = [old] * (1 + which % 3)
            case 6 if isinstance(old, int | float):
                inside[key] = old * (-1, 0, 2, 10, 1e6, 0.5)[which % 6]
            case _ if isinstance(inside, dict):
                inside[("", "a", "../x", f"{key}x", "\x00", "9" * 30)[which % 6]] = inside.pop(key)
            case _:
                inside.insert(key, old)
