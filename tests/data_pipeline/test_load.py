"""A thousand shards: the build ends, and one that was stopped by SIGTERM goes on from the tasks it had finished."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from data_pipeline.config import DataConfig
from lineage.digest import check_seal
from lineage.errors import Interrupted
from tests.data_pipeline.builds import build, config_for, in_child
from tests.data_pipeline.conftest import sentences, write_jsonl

SHARDS = 1000
FILLING = "x" * 60_000
"""A line that is no document, so that no two files fit a shard of 64 KiB."""
STOPPED_AT = 400


def build_until_a_signal(folder: Path, config: DataConfig) -> None:
    """Build in this process, which gets a SIGTERM when so many directories have come to their names."""
    renamed = 0

    def stop(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal renamed
        if event == "os.rename" and str(arguments[0]).startswith(str(folder / "out")):
            renamed += 1
            if renamed == STOPPED_AT:
                os.kill(os.getpid(), signal.SIGTERM)

    sys.addaudithook(stop)
    try:
        build(folder, config, "out")
    except Interrupted:
        (folder / "interrupted").touch()


def test_a_thousand_shards_go_on_after_a_signal(tmp_path: Path) -> None:
    (tmp_path / "data" / "lambada").mkdir(parents=True)
    write_jsonl(tmp_path / "data" / "lambada" / "lambada_test.jsonl", [sentences(20, SHARDS)])
    (tmp_path / "corpus").mkdir()
    for number in range(SHARDS):
        line = json.dumps({"text": sentences(20, number)})
        (tmp_path / "corpus" / f"{number:04d}.jsonl").write_text(f"{line}\n{FILLING}\n", encoding="utf-8")
    config = config_for(f"jsonl:{tmp_path / 'corpus'}", "shard_bytes=65536")
    in_child(build_until_a_signal, tmp_path, config)
    assert (tmp_path / "interrupted").exists()
    finished = [path for path in (tmp_path / "out").glob("*/.work/prepare*/*") if path.is_dir()]
    assert len(finished) > STOPPED_AT // 4
    run = build(tmp_path, config, "out")
    check_seal(run)
    ledger = json.loads((run / "ledger.json").read_text(encoding="utf-8"))
    assert len(ledger["shards"]) == ledger["malformed_lines"] == SHARDS
