"""TensorBoard's event files, read by Google's protocol buffers and by the published framing."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]

from engine.metrics import EVENTS
from engine.tensorboard import EventFile, crc32c
from engine.trainer import train
from engine.training_run import read_metrics
from lineage.config import parse_config
from tests.engine.small_run import small_config

Field = descriptor_pb2.FieldDescriptorProto


def event_class() -> Any:
    """The fields of tensorflow/core/util/event.proto and framework/summary.proto that scalars need."""
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", package="tensorflow", syntax="proto3")
    messages: dict[str, list[tuple[str, int, Any, str]]] = {
        "Value": [("tag", 1, Field.TYPE_STRING, ""), ("simple_value", 2, Field.TYPE_FLOAT, "")],
        "Summary": [("value", 1, Field.TYPE_MESSAGE, ".tensorflow.Value")],
        "Event": [
            ("wall_time", 1, Field.TYPE_DOUBLE, ""),
            ("step", 2, Field.TYPE_INT64, ""),
            ("file_version", 3, Field.TYPE_STRING, ""),
            ("summary", 5, Field.TYPE_MESSAGE, ".tensorflow.Summary"),
        ],
    }
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field, number, kind, type_name in fields:
            label = Field.LABEL_REPEATED if field == "value" else Field.LABEL_OPTIONAL
            message.field.add(name=field, number=number, type=kind, type_name=type_name or None, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Event"))


EVENT = event_class()


def bitwise_crc32c(data: bytes) -> int:
    """RFC 3720's polynomial, bit by bit."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def unmask(masked: int) -> int:
    rotated = (masked - 0xA282EAD8) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def read_events(path: Path) -> list[Any]:
    """Every event of a file; each checksum must hold."""
    data, events = path.read_bytes(), []
    while data:
        (length, length_crc) = struct.unpack_from("<QI", data)
        event, (event_crc,) = data[12 : 12 + length], struct.unpack_from("<I", data, 12 + length)
        assert unmask(length_crc) == bitwise_crc32c(data[:8])
        assert unmask(event_crc) == bitwise_crc32c(event)
        events.append(EVENT.FromString(event))
        data = data[16 + length :]
    return events


def scalars(path: Path) -> list[tuple[str, int, float]]:
    return [(value.tag, event.step, value.simple_value) for event in read_events(path) for value in event.summary.value]


@pytest.mark.parametrize(
    ("data", "expected"), [(b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (bytes(range(32)), 0x46DD794E)]
)
def test_crc32c_gives_the_vectors_of_rfc_3720(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


def test_an_event_file_is_read_back(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "events", 1.5)
    file.add_scalars(300_000, {"train/loss": 2.5, "größe": -1e-8}, 2.5)
    file.close()
    head, event = read_events(tmp_path / "events")
    assert (head.wall_time, head.file_version, head.step) == (1.5, "brain.Event:2", 0)
    assert (event.wall_time, event.step) == (2.5, 300_000)
    assert [(value.tag, value.simple_value) for value in event.summary.value] == [
        ("train/loss", 2.5),
        ("größe", pytest.approx(-1e-8)),
    ]


def test_a_run_has_none_unless_asked(uninterrupted: Path) -> None:
    assert not (uninterrupted / EVENTS).exists()


def test_the_event_file_says_what_the_metrics_say_also_after_going_on(
    dataset: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / uninterrupted.name
    shutil.copytree(uninterrupted, run)
    shutil.rmtree(run / "checkpoints" / "iter_0000060")
    (run / "COMPLETE").unlink()
    values = small_config(dataset).model_dump(mode="json", exclude_none=True)
    asked = parse_config(values | {"record": {"tensorboard": True}}, type(small_config(dataset)), "the test")
    assert train(asked, tmp_path).path == run  # asking does not make it another run
    expected = [
        (f"{line['kind']}/{name}", line["iteration"], value)
        for line in read_metrics(run)
        for name, value in line.items()
        if name not in ("kind", "iteration", "spike", "skipped")
    ]
    assert scalars(run / EVENTS) == [
        (tag, iteration, pytest.approx(value, rel=1e-6)) for tag, iteration, value in expected
    ]
    assert str(EVENTS) in json.loads((run / "COMPLETE").read_text(encoding="utf-8"))["files"]
