"""`mlm-experiment simulate`: CSV in, CSV out."""

import csv
import time
from pathlib import Path

import pytest

from mlm_repro.experiments.simulator.batch import INPUTS, RESULTS, simulate_file
from mlm_repro.experiments.simulator.workload import NOT_COSTED
from tests.commands import call

HEADER = "cluster,gpus,global_batch,micro_batch,hidden,heads,layers,seq,tp,dp,pp"
GOOD = "dgx-a100-80g,64,512,2,3072,32,30,2048,1,64,1"


def answers(tmp_path: Path, *lines: str) -> list[dict[str, str]]:
    rows, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
    done = call({}, "mlm-experiment", "simulate", str(rows), "--out", str(out))
    assert (done.code, done.err) == (0, f"cost: predicts {len(lines) - 1} rows\n")
    with out.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_row_is_answered_in_order(tmp_path: Path) -> None:
    found = answers(
        tmp_path,
        HEADER + ",vocab,chunks,recompute",
        GOOD + ",,,",
        GOOD.replace("dgx-a100-80g", "cray-1") + ",,,",
        GOOD.replace(",64,512", ",63,512") + ",51200,1,full",
        GOOD.replace(",2,3072", ",two,3072") + ",,,",
        GOOD.replace(",2,3072", ",,3072") + ",,,",
        GOOD + ",51200.0,1.0,Full",
        GOOD.replace("2048", "1e12") + ",,,",
    )
    assert list(found[0]) == [*INPUTS, *RESULTS]
    assert [row["fits"] for row in found] == [
        "true",
        "false",
        "false",
        "false",
        "false",
        "true",
        "false",
    ]
    first = found[0]
    assert float(first["low_ms"]) < float(first["iteration_ms"]) < float(first["high_ms"])
    assert float(first["iteration_ms"]) == pytest.approx(3700.5, rel=0.25)  # measured
    assert [found[5][name] for name in RESULTS] == [first[name] for name in RESULTS]
    reasons = [
        "",
        "no cluster 'cray-1'",
        "is not gpus = 63",
        "'two' is not a whole number",
        "the column micro_batch is missing or empty",
        "",
        "'1e12' is not a whole number of at most a billion",
    ]
    for row, reason in zip(found, reasons, strict=True):
        assert reason in row["reason"]
        assert bool(row["reason"]) == bool(reason)
        if reason:
            assert {row[name] for name in RESULTS[:6]} == {""}


def test_software_is_the_cluster_s_unless_a_row_names_another(tmp_path: Path) -> None:
    """And a row that the software's constants were fitted on is said to be."""
    row = "dgx-2h-v100,8,8,8,3072,16,72,1024,8,1,1"  # 2019 paper, Table 7
    names = ("", "megatron-2019", "megatron-2021", "cobol")
    own, same, newer, none = answers(
        tmp_path, f"{HEADER},software", *(f"{row},{name}" for name in names)
    )
    assert [own[name] for name in RESULTS] == [same[name] for name in RESULTS]
    assert float(newer["iteration_ms"]) < float(own["iteration_ms"])
    assert (own["fitted"], newer["fitted"], none["fitted"]) == ("true", "false", "")
    assert "there is no software 'cobol'" in none["reason"]


def test_a_llama_is_not_costed_and_the_other_rows_are(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    lines = (f"{HEADER},family,ffn_hidden", f"{GOOD},llama,8192", f"{GOOD},,8192", f"{GOOD},,")
    rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
    done = call({}, "mlm-experiment", "simulate", str(rows), "--out", str(out), "--quiet", ends=2)
    said = f"2 of 3 rows of {rows}: {NOT_COSTED}; {out} has the predictions of the others"
    assert done.err == f"error: {said}\n"
    with out.open(encoding="utf-8", newline="") as file:
        assert [NOT_COSTED in row["reason"] for row in csv.DictReader(file)] == [True, True, False]


def test_a_thousand_rows_take_less_than_20_seconds(tmp_path: Path) -> None:
    """Of processor time, and no two alike."""
    rows, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    lines = [
        f"{cluster},{8 * ranks},{512 * (1 + number)},2,3072,32,30,2048,{tp},{ranks},{8 // tp}"
        for number in range(12)
        for tp in (1, 2, 4, 8)
        for ranks in (1, 2, 4, 8)
        for cluster in ("selene", "h100", "h200", "b200", "dgx-2h-v100", "dgx-a100-80g")
    ]
    rows.write_text("\n".join([HEADER, *lines[:1000]]) + "\n", encoding="utf-8")
    began = time.process_time()
    assert simulate_file(rows, out)[0] == 1000
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"cluster,gpus\ncpu,1\n", "has no row with the columns global_batch, micro_batch"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"", "has no row with the columns cluster, gpus"),
        (None, "there is no workload file"),
    ],
)
def test_an_unreadable_file_is_one_sentence(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    rows, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    if content is not None:
        rows.write_bytes(content)
    done = call({}, "mlm-experiment", "simulate", str(rows), "--out", str(out), ends=2)
    assert words in done.err
    assert not out.exists()
