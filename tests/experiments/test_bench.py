"""`mlm-bench parallel`: what it reports is what was measured, and everyone measured computes the same thing."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from engine.costs import flops_per_iteration
from experiments.bench.contenders import Contender, contenders
from experiments.bench.parallel import DROPOUTS, TOLERANCE, Measured, disagreements, summarize
from experiments.bench.sizes import bench_size, read_size
from experiments.bench.table import show_parallel
from experiments.bench.timing import Timed, median_ratio

OURS = {"serial": 1, "tp2": 2, "pp2": 2, "dp2": 2}
PEERS = {
    "Hugging Face GPT-2": 1,
    "Hugging Face GPT-2, DDP": 2,
    "nanoGPT-style": 1,
    "nanoGPT-style, DDP": 2,
    "ZeRO-3 (FSDP2)": 2,
}
RANKS = OURS | PEERS
TWIN = bench_size("twin", read_size("twin").model, batch=2, iterations=3, warm_up=1)
PROGRAM = """
import sys
from experiments.bench import cli, sizes
twin = sizes.bench_size('twin', sizes.read_size('twin').model, batch=2, iterations=3, warm_up=1)
sizes.read_size = {'twin': twin}.__getitem__
sys.argv[0] = 'mlm-bench'
cli.main()
"""
"""`mlm-bench` with a twin of a quarter of the batch, for as many iterations as show that all compute the same."""


def bench(*arguments: object) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "parallel", *map(str, arguments)],
        capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"},
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """The result of one round at the smallest size, what was printed, and the file."""
    path = tmp_path_factory.mktemp("bench") / "new" / "parallel.json"
    done = bench("--size=twin", "--rounds=1", "--json", path)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout, path


def rates(result: dict[str, Any], dropout: float) -> dict[str, list[float]]:
    return {row["name"]: row["tokens_per_second"] for row in result["contenders"] if row["dropout"] == dropout}


def test_everyone_is_measured_in_every_round(run: tuple[dict[str, Any], str, Path]) -> None:
    result = run[0]
    assert (result["benchmark"], result["size"], result["rounds"]) == ("parallel", "twin", 1)
    assert result["model"]["num_layers"] == TWIN.model.num_layers
    assert {(row["name"], row["ranks"], row["dropout"]) for row in result["contenders"]} == {
        (name, ranks, dropout) for name, ranks in RANKS.items() for dropout in (0.0, 0.1)
    }
    for row in result["contenders"]:
        assert row["status"] == "measured"
        assert len(row["tokens_per_second"]) == 1
        assert row["median"] == row["tokens_per_second"][0] > 0
    assert {row["schedule"] for row in result["contenders"] if row["name"] == "pp2"} == {"1f1b"}


def test_everyone_computes_the_same_thing(run: tuple[dict[str, Any], str, Path]) -> None:
    result = run[0]
    plain = {row["name"]: row for row in result["losses"] if row["dropout"] == 0.0}
    assert plain.keys() == RANKS.keys()
    for loss in plain.values():
        assert loss["first"] == pytest.approx(plain["serial"]["first"], abs=TOLERANCE)
        assert loss["last"] == pytest.approx(plain["serial"]["last"], abs=TOLERANCE)
    assert plain["serial"]["last"] < plain["serial"]["first"] - 100 * TOLERANCE  # it trains, and a wrong step shows
    dropped = {row["name"]: row["last"] for row in result["losses"] if row["dropout"] == 0.1}
    for name in OURS:
        assert dropped[name] == pytest.approx(dropped["serial"], abs=TOLERANCE)
    assert dropped["nanoGPT-style"] != pytest.approx(dropped["serial"], abs=1e-6)  # other masks
    assert result["disagreements"] == []


def test_the_ratios_are_those_of_the_figures(run: tuple[dict[str, Any], str, Path]) -> None:
    result = run[0]
    for dropout in DROPOUTS:
        found, ratios = rates(result, dropout), result["ratios"][f"dropout {dropout:g}"]
        expected = {name: found[name][0] / found["serial"][0] for name in RANKS}
        assert ratios["to_serial"] == pytest.approx(expected, rel=1e-3)
        assert ratios["ours_to_peer"].keys() == PEERS.keys()
        for peer, ours in ratios["ours_to_peer"].items():
            assert ours.keys() == {name for name, ranks in OURS.items() if ranks == RANKS[peer]}
            assert ours == pytest.approx({name: found[name][0] / found[peer][0] for name in ours}, rel=1e-3)


def test_the_limit_is_that_of_matrix_products(run: tuple[dict[str, Any], str, Path]) -> None:
    result, _, _ = run
    limit, per_token = result["limit"], flops_per_iteration(TWIN.model, TWIN.train) / TWIN.tokens
    assert limit["gflop_per_token"] == pytest.approx(per_token / 1e9, rel=0.01)
    assert limit["gemm_gflops"].keys() == {"1", "2"}
    for row in result["contenders"]:
        reached = row["median"] * per_token / 1e9
        assert row["gemm_share"] == pytest.approx(reached / limit["gemm_gflops"][str(row["ranks"])], rel=0.01)


def test_the_file_and_the_terminal_say_what_was_not_run(run: tuple[dict[str, Any], str, Path]) -> None:
    result, printed, path = run
    for name in ("megatron-core", "picotron"):
        assert any(note.startswith(f"{name}: does not run on CPU") for note in result["notes"])
    for name in RANKS:
        assert name in printed
    assert "GFLOP/s" in printed
    assert str(path.parent) not in path.read_text()
    assert result["environment"]["argv"] == ["mlm-bench", "parallel", "--size=twin", "--rounds=1"]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rounds", "0"], "--rounds"),
        (["--rounds", "many"], "--rounds"),
        (["--size", "huge"], "--size"),
        (["--json", "."], "is a directory"),
        (["--json", f"{__file__}/result.json"], "a part of its path is a file"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(arguments: list[str], words: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == ""


def timed(seconds: list[float], losses: list[float] | None = None) -> Timed:
    return Timed(seconds, losses or [8.0, 7.5])


def made_up(every: list[Contender], **seconds: list[list[float]]) -> Measured:
    """Rounds of one second an iteration, or as given by name."""
    return {
        (one.name, dropout): [timed(times) for times in seconds.get(one.name, [[1.0], [1.0], [1.0]])]
        for one in every
        if one.is_installed
        for dropout in DROPOUTS
    }


def test_a_round_counts_as_its_median_and_a_ratio_is_taken_within_rounds() -> None:
    every = contenders()
    measured = made_up(every, serial=[[4.0, 2.0, 9.0], [1.0], [8.0]], dp2=[[2.0], [2.0], [4.0]])
    result = summarize(TWIN, every, measured, {1: 10.0, 2: 20.0}, [1.5])
    assert rates(result, 0.0)["serial"] == [TWIN.tokens / 4, TWIN.tokens, TWIN.tokens / 8]
    assert result["ratios"]["dropout 0"]["to_serial"]["dp2"] == 2.0  # of 2, 0.5 and 2
    assert result["ratios"]["dropout 0"]["ours_to_peer"]["nanoGPT-style, DDP"]["dp2"] == 0.5
    assert median_ratio([1.0, 6.0, 4.0], [1.0, 2.0, 2.0]) == median([1.0, 3.0, 2.0])
    with pytest.raises(ValueError, match="shorter"):
        median_ratio([1.0, 2.0], [1.0])


def test_a_peer_that_is_not_installed_is_said_to_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    every = [dataclasses.replace(one, needs=one.needs and "not_a_module_of_anyone") for one in contenders()]
    result = summarize(TWIN, every, made_up(every), {1: 10.0, 2: 20.0}, [1.5])
    missing = [row for row in result["contenders"] if row["status"] == "not installed"]
    assert {row["name"] for row in missing} == {"Hugging Face GPT-2", "Hugging Face GPT-2, DDP"}
    assert all(row["median"] is None and row["tokens_per_second"] == [] for row in missing)
    assert result["ratios"]["dropout 0"]["ours_to_peer"].keys() == {
        "nanoGPT-style", "nanoGPT-style, DDP", "ZeRO-3 (FSDP2)"
    }  # fmt: skip
    show_parallel(result)
    assert "not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "dropout", "losses", "found"),
    [
        ("nanoGPT-style", 0.0, [8.0, 7.5005], False),
        ("nanoGPT-style", 0.0, [8.0, 7.502], True),
        ("nanoGPT-style", 0.0, [8.0, float("nan")], True),
        ("nanoGPT-style", 0.1, [8.0, 7.9], False),
        ("tp2", 0.1, [8.0, 7.9], True),
    ],
)
def test_a_contender_that_computes_something_else_is_named(
    name: str, dropout: float, losses: list[float], found: bool
) -> None:
    every = contenders()
    measured = made_up(every)
    assert disagreements(every, measured) == []
    measured[name, dropout][0] = timed([1.0], losses)
    sentences = disagreements(every, measured)
    assert json.dumps(summarize(TWIN, every, measured, {1: 10.0, 2: 20.0}, [1.5]), allow_nan=False)
    assert [sentence.startswith(f"{name} computes something else") for sentence in sentences] == [True] * found
