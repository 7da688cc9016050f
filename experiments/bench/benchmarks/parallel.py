"""Training throughput of this engine's layouts beside the peers that run here, interleaved round by round."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from statistics import median
from typing import Annotated, Any

import typer

from engine.config import ParallelConfig
from engine.costs import flops_per_token
from experiments.bench import timing
from experiments.bench.contender import TOLERANCE, BenchSize, Contender, left_out, read_size
from experiments.bench.timing import NOTES, Rounds, Timed, gemm_gflops, on_ranks, ratio, rounded, series
from lineage.benchmark import Benchmark, Case
from lineage.environment import available_cores
from lineage.extras import import_extra
from lineage.progress import announce

SERIAL = "serial"
"""This engine on one rank."""
PRODUCTS = "matrix products"
DROPOUTS = (0.0, 0.1)

Measured = dict[tuple[str, float], list[Timed]]
"""What was timed, by contender and dropout: one entry per round."""


Size = StrEnum("Size", ["TINY", "TWIN"])
"""Shapes that are measured."""


def contenders() -> list[Contender]:
    """All of them, in the order in which every round measures them: ours and peers in turn."""
    from experiments.bench.contenders.ours import build_ours
    from experiments.bench.contenders.peers import build_huggingface, build_nanogpt

    return [
        Contender(SERIAL, 1, build_ours, is_ours=True),
        Contender("Hugging Face GPT-2", 1, build_huggingface, needs="transformers"),
        Contender("tp2", 2, build_ours, is_ours=True, parallel=ParallelConfig(tp=2)),
        Contender("Hugging Face GPT-2, DDP", 2, build_huggingface, needs="transformers"),
        Contender("pp2", 2, build_ours, is_ours=True, parallel=ParallelConfig(pp=2), microbatches=2),
        Contender("nanoGPT-style", 1, build_nanogpt),
        Contender("dp2", 2, build_ours, is_ours=True),
        Contender("nanoGPT-style, DDP", 2, build_nanogpt),
        Contender("ZeRO-3 (FSDP2)", 2, build_ours, parallel=ParallelConfig(shard_parameters=True)),
    ]


def measure(
    rounds: Rounds = 3,
    size: Annotated[
        Size, typer.Option(help="tiny: 4 layers, 256 wide, 50,304 words; twin: the 8.3b twin.")
    ] = Size.TINY,
) -> Benchmark:
    """Training tokens/s on processor cores: serial, tp2, pp2, dp2 and the peers installed here.

    Forward, backward, gradient reduction and AdamW in fp32, with dropout 0 and 0.1, one thread per process. Ends with
    code 3 if a contender's losses show that it computed something else.
    """
    shape, every = read_size(size.value), contenders()
    running = [contender for contender in every if contender.is_installed]
    if any(contender.needs == "transformers" for contender in running):
        import_extra("transformers.models.gpt2.modeling_gpt2", "bench")
    ranks = sorted({contender.ranks for contender in every})
    announce(
        f"{rounds} rounds of {len(running)} contenders, {shape.train.iterations} iterations at each of {len(DROPOUTS)} "
        f"dropouts, on up to {max(ranks)} processes"
    )
    measurements: dict[tuple[str, float], Callable[[], Any]] = {
        (PRODUCTS, number): partial(on_ranks, PRODUCTS, number, gemm_gflops, number) for number in ranks
    }
    for each in running:
        for dropout in DROPOUTS:
            measurements[each.name, dropout] = partial(timing.measure_contender, each, shape, dropout)
    taken, load = timing.in_turn("parallel", rounds, measurements)
    gflops = {number: max(rate for rate, *_ in taken.pop((PRODUCTS, number))) for number in ranks}
    return summarize(shape, every, taken, gflops, load)


def summarize(
    size: BenchSize, every: Sequence[Contender], measured: Measured, gflops: dict[int, float], load: Sequence[float]
) -> Benchmark:
    """The result from what was timed on each contender that is installed.

    `gflops` is what matrix products reach, by the number of ranks that compute at once; `load` the load averages of
    the system after each round.
    """
    ranks, cores = max(contender.ranks for contender in every), available_cores()
    return Benchmark(
        benchmark="parallel",
        title="Training throughput",
        cases=[_case(size, every, measured, gflops, dropout) for dropout in DROPOUTS],
        disagreements=disagreements(every, measured),
        notes=[*NOTES["parallel"], *([f"{ranks} ranks shared {cores} processor core"] if cores < ranks else [])],
        setting={"rounds": len(next(iter(measured.values()))), "size": size.name, "model": size.describe()},
        load_average=list(load),
    )


def _case(
    size: BenchSize, every: Sequence[Contender], measured: Measured, gflops: dict[int, float], dropout: float
) -> Case:
    present = [contender for contender in every if contender.is_installed]
    rounds = {contender.name: measured[contender.name, dropout] for contender in present}
    rates = timing.rates(size, rounds)
    per_token = flops_per_token(size.model)
    limits = {ranks: rate * 1e9 / per_token for ranks, rate in gflops.items()}
    return Case(
        name=f"dropout {dropout:g}",
        series=[
            *(series(name, "rate", "tokens/s", *many) for name, many in rates.items()),
            *(series(f"limit of {ranks} ranks", "rate", "tokens/s", each, kind="computed")
              for ranks, each in limits.items()),
            *(series(one.name, "share of the limit", "", median(rates[one.name]) / limits[one.ranks])
              for one in present),
            *(series(f"{PRODUCTS} on {ranks} ranks", "speed", "GFLOP/s", rate) for ranks, rate in gflops.items()),
        ],
        ratios=[
            *(ratio(f"{name} ÷ {SERIAL}", many, rates[SERIAL]) for name, many in rates.items() if name != SERIAL),
            *(ratio(f"{ours.name} ÷ {peer.name}", rates[ours.name], rates[peer.name])
              for peer in present if not peer.is_ours
              for ours in present if ours.is_ours and ours.ranks == peer.ranks),
        ],
        missing=left_out(every),
        losses=timing.first_losses(rounds),
        setting={"layouts": [contender.describe() for contender in every], "gflop_per_token": rounded(per_token / 1e9)},
    )  # fmt: skip


def disagreements(every: Sequence[Contender], measured: Measured) -> list[str]:
    """A sentence for each contender whose losses are not those of our serial run.

    Compared are all losses of all rounds without dropout and, for our layouts, whose masks are equal, with it.
    """
    ours = {contender.name for contender in every if contender.is_ours}
    sentences = []
    for dropout in DROPOUTS:
        compared = {
            name: rounds
            for (name, probability), rounds in measured.items()
            if probability == dropout and (not dropout or name in ours)
        }
        sentences += timing.differing_losses(f"dropout {dropout:g}", compared, TOLERANCE)
    return sentences
