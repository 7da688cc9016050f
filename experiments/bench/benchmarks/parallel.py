"""Training throughput of this engine's layouts beside the peers that run here, interleaved round by round."""

from collections.abc import Sequence
from enum import StrEnum
from statistics import median
from typing import Annotated

import typer

from engine.costs import flops_per_token
from engine.launch.allocator import keep_large_buffers
from experiments.bench import sizes
from experiments.bench.contender import SERIAL, TOLERANCE, Contender
from experiments.bench.contenders import NOTES, contenders, left_out
from experiments.bench.sizes import BenchSize
from experiments.bench.timing import (
    Rounds,
    Timed,
    differing_losses,
    finite,
    gemm_gflops,
    load_average,
    on_ranks,
    ratio,
    rounded,
    series,
    time_contender,
)
from lineage.benchmark import Benchmark, Case
from lineage.environment import available_cores
from lineage.extras import import_extra
from lineage.progress import Progress, announce

DROPOUTS = (0.0, 0.1)

Measured = dict[tuple[str, float], list[Timed]]
"""What was timed, by contender and dropout: one entry per round."""


class Size(StrEnum):
    """Shapes that are measured."""

    TINY = "tiny"
    TWIN = "twin"


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
    keep_large_buffers()
    import torch._dynamo  # noqa: F401  (imported here once, so that forked ranks do not each import it)

    shape, every = sizes.read_size(size.value), contenders()
    running = [contender for contender in every if contender.is_installed]
    if any(contender.needs == "transformers" for contender in running):
        import_extra("transformers.models.gpt2.modeling_gpt2", "bench")

    measured: Measured = {(contender.name, dropout): [] for contender in running for dropout in DROPOUTS}
    numbers_of_ranks = sorted({contender.ranks for contender in every})
    gflops = dict.fromkeys(numbers_of_ranks, 0.0)
    load = []
    announce(
        f"{rounds} rounds of {len(running)} contenders, {shape.train.iterations} iterations at each of {len(DROPOUTS)} "
        f"dropouts, on up to {max(numbers_of_ranks)} processes"
    )
    with Progress("parallel", rounds * len(running), "measurements") as progress:
        for _ in range(rounds):
            for ranks in numbers_of_ranks:
                gflops[ranks] = max(gflops[ranks], on_ranks("matrix products", ranks, gemm_gflops, ranks)[0])
            for contender in running:
                by_rank = on_ranks(contender.name, contender.ranks, time_contender, contender, shape, DROPOUTS)[0]
                for dropout, timed in zip(DROPOUTS, by_rank, strict=True):
                    measured[contender.name, dropout].append(timed)
                progress.advance(1, contender.name)
            load.append(load_average())
    return summarize(shape, every, measured, gflops, load)


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
        notes=[*NOTES, *([f"{ranks} ranks shared {cores} processor core"] if cores < ranks else [])],
        setting={"rounds": len(next(iter(measured.values()))), "size": size.name, "model": size.describe()},
        load_average=list(load),
    )


def _case(
    size: BenchSize, every: Sequence[Contender], measured: Measured, gflops: dict[int, float], dropout: float
) -> Case:
    present = [contender for contender in every if contender.is_installed]
    rounds = {contender.name: measured[contender.name, dropout] for contender in present}
    rates = {name: [size.tokens / median(timed.seconds) for timed in many] for name, many in rounds.items()}
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
            *(series(f"matrix products on {ranks} ranks", "speed", "GFLOP/s", rate) for ranks, rate in gflops.items()),
        ],
        ratios=[
            *(ratio(f"{name} ÷ {SERIAL}", rates[name], rates[SERIAL]) for name in rates if name != SERIAL),
            *(ratio(f"{ours.name} ÷ {peer.name}", rates[ours.name], rates[peer.name])
              for peer in present if not peer.is_ours
              for ours in present if ours.is_ours and ours.ranks == peer.ranks),
        ],
        missing=left_out(every),
        losses={name: finite(many[0].losses) for name, many in rounds.items()},
        setting={"layouts": [contender.describe() for contender in every], "gflop_per_token": rounded(per_token / 1e9)},
    )  # fmt: skip


def disagreements(every: Sequence[Contender], measured: Measured) -> list[str]:
    """A sentence for each contender whose losses are not those of our serial run.

    Compared are all losses of all rounds without dropout and, for our layouts, whose masks are equal, with it.
    """
    ours = {contender.name for contender in every if contender.is_ours}
    return [
        sentence
        for dropout in DROPOUTS
        for sentence in differing_losses(
            f"dropout {dropout:g}",
            {name: [timed.losses for timed in rounds] for (name, probability), rounds in measured.items()
             if probability == dropout and (not dropout or name in ours)},
            TOLERANCE,
        )
    ]  # fmt: skip
