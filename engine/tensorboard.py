"""TensorBoard's event files, written without TensorBoard. Imports no torch.

A file is a sequence of TFRecords (tensorflow/core/lib/io/record_writer.h), each an Event message
(tensorflow/core/util/event.proto) in the protocol-buffer wire format.
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

CASTAGNOLI = 0x82F63B78
"""CRC-32C's polynomial, lowest bit first (RFC 3720, appendix B.4)."""
VERSION = b"brain.Event:2"


class EventFile:
    """An event file that is new, to which scalars are added one iteration after the other."""

    def __init__(self, path: Path, wall_time_seconds: float) -> None:
        """Replaces what stands at `path`; TensorBoard looks for names that contain `tfevents`."""
        self._file: BinaryIO = path.open("wb")
        self._add(_double(1, wall_time_seconds) + _bytes(3, VERSION))

    def add_scalars(self, iteration: int, scalars: Mapping[str, float], wall_time_seconds: float) -> None:
        """One event with a value for each tag, in 32-bit floats as the format has it."""
        values = b"".join(
            _bytes(1, _bytes(1, tag.encode("utf-8", "replace")) + _float(2, value)) for tag, value in scalars.items()
        )
        self._add(_double(1, wall_time_seconds) + _integer(2, iteration) + _bytes(5, values))

    def close(self) -> None:
        """Nothing can be added after this."""
        self._file.close()

    def _add(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked_crc(length) + event + _masked_crc(event))
        self._file.flush()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of `data`."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _crc_of_byte(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (CASTAGNOLI if value & 1 else 0)
    return value


_TABLE = [_crc_of_byte(byte) for byte in range(256)]


def _masked_crc(data: bytes) -> bytes:
    """Rotated and shifted, so that the checksum of data that holds checksums stays sound."""
    value = crc32c(data)
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", math.inf if value > 0 else -math.inf)
    return _varint(field << 3 | 5) + packed
