"""A verb says what its work takes before it starts, and at its end where the result lies."""

import re
import shlex
from pathlib import Path

import pytest

from tests.commands import call

ROWS = """cluster,gpus,global_batch,micro_batch,hidden,heads,layers,seq,tp,dp,pp
dgx-a100-80g,64,512,2,3072,32,30,2048,1,64,1
"""
COSTS = {
    "mlm-data clean jsonl:{here}/texts.jsonl {here}/cleaned": (
        r"reads about 2\.\d kB of text; processes: \d+; up to \d\.\d kB of disk while it works",
        "clean {here}/cleaned: ",
    ),
    "mlm-experiment simulate {here}/rows.csv --out {here}/out.csv": (
        r"predicts 1 rows",
        "{here}/out.csv: 1 rows",
    ),
    "mlm-verify run results/reproduce-8.3b": (r"reads \d+\.\d MB in 1 sealed directories", "ok "),
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Small inputs of the verbs."""
    (tmp_path / "rows.csv").write_text(ROWS)
    (tmp_path / "texts.jsonl").write_text('{"text": "The river runs below the hill."}\n' * 50)
    return tmp_path


@pytest.mark.parametrize("command", COSTS, ids=lambda command: " ".join(command.split()[:2]))
def test_the_cost_comes_first_and_the_place_of_the_result_last(command: str, here: Path) -> None:
    cost, result = COSTS[command]
    done = call({"OMP_NUM_THREADS": "1"}, *shlex.split(command.format(here=here)), ends=0)
    assert re.fullmatch(f"cost: {cost}", done.err.splitlines()[0]), done.err
    assert done.out.splitlines()[-1].startswith(result.format(here=here))
    assert not re.search(r"[\r\x1b]", done.out + done.err)
