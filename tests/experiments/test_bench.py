"""`mlm-bench parallel`: what it reports is what was measured, and everyone measured computes the same thing."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from engine.costs import flops_per_token
from experiments.bench.benchmarks.parallel import DROPOUTS, Measured, contenders, disagreements, summarize
from experiments.bench.contender import TOLERANCE, Contender, bench_size, read_size
from experiments.bench.show import show
from experiments.bench.timing import Timed, ratio
from lineage.benchmark import Benchmark, Case, read_benchmark

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
from experiments.bench import cli
from experiments.bench.benchmarks import parallel
from experiments.bench.contender import bench_size, read_size
twin = bench_size('twin', read_size('twin').model, batch=2, iterations=3, warm_up=1)
parallel.read_size = {'twin': twin}.__getitem__
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


Run = tuple[Benchmark, str, Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The result of one round at the smallest size, what was printed, and the file."""
    path = tmp_path_factory.mktemp("bench") / "new" / "parallel.json"
    done = bench("--size=twin", "--rounds=1", "--json", path)
    assert done.returncode == 0, done.stderr
    return read_benchmark(path), done.stdout, path


def rates(case: Case, measure: str = "rate") -> dict[str, list[float]]:
    """Samples of what was measured, by contender."""
    return {one.contender: one.samples for one in case.series if (one.measure, one.kind) == (measure, "measured")}


def test_everyone_is_measured_in_every_round(run: Run) -> None:
    result = run[0]
    assert (result.benchmark, result.setting["size"], result.setting["rounds"]) == ("parallel", "twin", 1)
    assert result.setting["model"]["num_layers"] == TWIN.model.num_layers
    assert [case.name for case in result.cases] == ["dropout 0", "dropout 0.1"]
    for case in result.cases:
        assert rates(case).keys() == RANKS.keys()
        assert case.missing == {}
        assert all(len(samples) == 1 and samples[0] > 0 for samples in rates(case).values())
        assert {one["schedule"] for one in case.setting["layouts"] if one["name"] == "pp2"} == {"1f1b"}


def test_everyone_computes_the_same_thing(run: Run) -> None:
    plain, dropped = (case.losses for case in run[0].cases)
    assert plain.keys() == dropped.keys() == RANKS.keys()
    for losses in plain.values():
        assert losses == pytest.approx(plain["serial"], abs=TOLERANCE)
    first, *_, last = plain["serial"]
    assert first is not None
    assert last is not None
    assert last < first - 100 * TOLERANCE  # it trains, and a wrong step shows
    for name in OURS:
        assert dropped[name] == pytest.approx(dropped["serial"], abs=TOLERANCE)
    assert dropped["nanoGPT-style"] != pytest.approx(dropped["serial"], abs=1e-6)  # other masks
    assert run[0].disagreements == []


def test_the_ratios_are_those_of_the_figures(run: Run) -> None:
    to_serial = {(name, "serial") for name in RANKS if name != "serial"}
    to_peers = {(name, peer) for name in OURS for peer in PEERS if OURS[name] == PEERS[peer]}
    for case in run[0].cases:
        found = rates(case)
        assert {one.name: one.value for one in case.ratios} == pytest.approx(
            {f"{one} ÷ {other}": found[one][0] / found[other][0] for one, other in to_serial | to_peers}, rel=1e-3
        )


def test_the_limit_is_that_of_matrix_products(run: Run) -> None:
    per_token = flops_per_token(TWIN.model)
    for case in run[0].cases:
        assert case.setting["gflop_per_token"] == pytest.approx(per_token / 1e9, rel=0.01)
        gflops, shares = rates(case, "speed"), rates(case, "share of the limit")
        for name, samples in rates(case).items():
            limit = gflops[f"matrix products on {RANKS[name]} ranks"][0]
            assert shares[name][0] == pytest.approx(samples[0] * per_token / 1e9 / limit, rel=0.01)


def test_the_file_and_the_terminal_say_what_was_not_run(run: Run) -> None:
    result, printed, path = run
    for name in ("megatron-core", "picotron"):
        assert any(note.startswith(f"{name}: does not run on CPU") for note in result.notes)
    for name in RANKS:
        assert name in printed
    assert "GFLOP/s" in printed
    assert str(path.parent) not in path.read_text()
    assert result.environment.argv == ["mlm-bench", "parallel", "--size=twin", "--rounds=1"]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rounds", "0"], "--rounds"),
        (["--rounds", "many"], "--rounds"),
        (["--size", "huge"], "--size"),
        (["--json", "."], "is a directory"),
        (["--json", f"{__file__}/result.json"], "is not a directory"),
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
    case = result.cases[0]
    assert rates(case)["serial"] == [TWIN.tokens / 4, TWIN.tokens, TWIN.tokens / 8]
    values = {one.name: one.value for one in case.ratios}
    assert values["dp2 ÷ serial"] == 2.0  # of 2, 0.5 and 2
    assert values["dp2 ÷ nanoGPT-style, DDP"] == 0.5
    assert ratio("r", [1.0, 6.0, 4.0], [1.0, 2.0, 2.0]).value == median([1.0, 3.0, 2.0])
    with pytest.raises(ValueError, match="shorter"):
        ratio("r", [1.0, 2.0], [1.0])


def test_a_peer_that_is_not_installed_is_said_to_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    every = [dataclasses.replace(one, needs=one.needs and "not_a_module_of_anyone") for one in contenders()]
    result = summarize(TWIN, every, made_up(every), {1: 10.0, 2: 20.0}, [1.5])
    missing = dict.fromkeys(
        ("Hugging Face GPT-2", "Hugging Face GPT-2, DDP"), "not installed: pip install 'mlm-repro[bench]'"
    )
    for case in result.cases:
        assert case.missing == missing
        assert rates(case).keys() == RANKS.keys() - missing.keys()
    show(result)
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
    assert summarize(TWIN, every, measured, {1: 10.0, 2: 20.0}, [1.5]).disagreements == sentences
    assert [f"dropout {dropout:g}: losses of {name} differ" in sentence for sentence in sentences] == [True] * found
