"""JSON from files is read in one place, which bounds its size and depth; the exceptions are
listed."""

import ast

from tests.architecture.rooms import ROOMS, ROOT, modules, parse

READERS = {"lineage/atomic.py"}
FAST = {
    "data_pipeline/document.py",
    "data_pipeline/passes/measure.py",
    "data_pipeline/reading/lines.py",
    "data_pipeline/tokens/trace.py",
    "data_pipeline/work/document_shard.py",
    "data_pipeline/work/tasks.py",
}
"""Lines of corpora, of metrics and of the pipeline's own tasks, read with orjson, which refuses
what is too deep."""


def test_json_is_read_in_one_place() -> None:
    calls = {
        (path.relative_to(ROOT).as_posix(), ast.unparse(node.func))
        for room in ROOMS
        for path in modules(room)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(("json.load", "json.loads"))
    }
    assert {path for path, call in calls if call == "orjson.loads"} == FAST
    assert {path for path, call in calls if call != "orjson.loads"} == READERS
