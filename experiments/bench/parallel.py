"""Training throughput of this engine's layouts beside the peers that run here, interleaved round by round."""

import math
import os
from collections.abc import Sequence
from importlib.metadata import version
from statistics import median
from typing import Any

from engine.allocator import keep_large_buffers
from engine.costs import flops_per_token
from experiments.bench.contenders import NOTES, Contender, contenders, left_out
from experiments.bench.sizes import BenchSize
from experiments.bench.timing import Timed, gemm_gflops, median_ratio, on_ranks, time_contender
from lineage.environment import available_cores, describe_environment
from lineage.extras import import_extra
from lineage.progress import Progress, announce

DROPOUTS = (0.0, 0.1)
TOLERANCE = 1e-3
SERIAL = "serial"

Measured = dict[tuple[str, float], list[Timed]]
"""What was timed, by contender and dropout: one entry per round."""


def measure_parallel(size: BenchSize, rounds: int) -> dict[str, Any]:
    """Measure every contender `rounds` times in turn; the result as plain JSON values.

    Raises UserError naming the contender whose processes failed.
    """
    keep_large_buffers()
    import torch._dynamo  # noqa: F401  (imported here once, so that forked ranks do not each import it)

    every = contenders()
    running = [contender for contender in every if contender.is_installed]
    if any(contender.needs == "transformers" for contender in running):
        import_extra("transformers.models.gpt2.modeling_gpt2", "bench")

    measured: Measured = {(contender.name, dropout): [] for contender in running for dropout in DROPOUTS}
    numbers_of_ranks = sorted({contender.ranks for contender in every})
    gflops = dict.fromkeys(numbers_of_ranks, 0.0)
    load = []
    announce(
        f"{rounds} rounds of {len(running)} contenders, {size.train.iterations} iterations at each of {len(DROPOUTS)} "
        f"dropouts, on up to {max(numbers_of_ranks)} processes"
    )
    with Progress("parallel", rounds * len(running), "measurements") as progress:
        for _ in range(rounds):
            for ranks in numbers_of_ranks:
                gflops[ranks] = max(gflops[ranks], on_ranks("matrix products", ranks, gemm_gflops, ranks)[0])
            for contender in running:
                found = on_ranks(contender.name, contender.ranks, time_contender, contender, size, DROPOUTS)[0]
                for dropout, timed in zip(DROPOUTS, found, strict=True):
                    measured[contender.name, dropout].append(timed)
                progress.advance(1, contender.name)
            load.append(round(os.getloadavg()[0], 2))
    return summarize(size, every, measured, gflops, load)


def summarize(
    size: BenchSize,
    every: Sequence[Contender],
    measured: Measured,
    gflops: dict[int, float],
    load: Sequence[float],
) -> dict[str, Any]:
    """The result from what was timed on each contender that is installed.

    `gflops` is what matrix products reach, by the number of ranks that compute at once; `load` the load averages of
    the system after each round.
    """
    tokens_per_second = {
        key: [size.tokens / median(timed.seconds) for timed in rounds] for key, rounds in measured.items()
    }
    flops = flops_per_token(size.model)
    rows: list[dict[str, Any]] = []
    for dropout in DROPOUTS:
        for contender in every:
            row = contender.describe() | {"is_ours": contender.is_ours, "dropout": dropout}
            if not contender.is_installed:
                rows.append(row | {"status": "not installed", "tokens_per_second": [], "median": None})
                continue
            rates = tokens_per_second[contender.name, dropout]
            share = median(rates) * flops / 1e9 / gflops[contender.ranks]
            rows.append(
                row
                | {
                    "status": "measured",
                    "tokens_per_second": [round(rate, 1) for rate in rates],
                    "median": round(median(rates), 1),
                    "gemm_share": round(share, 4),
                }
            )
    environment = describe_environment()
    packages = environment["packages"] | ({"transformers": version("transformers")} if _has_transformers(every) else {})
    rounds = len(next(iter(measured.values())))
    return {
        "benchmark": "parallel",
        "size": size.name,
        "model": size.describe(),
        "rounds": rounds,
        "contenders": rows,
        "ratios": {f"dropout {dropout:g}": _ratios(every, tokens_per_second, dropout) for dropout in DROPOUTS},
        "losses": _losses(measured),
        "disagreements": disagreements(every, measured),
        "limit": {
            "gflop_per_token": round(flops / 1e9, 4),
            "gemm_gflops": {str(ranks): round(rate, 1) for ranks, rate in gflops.items()},
            "tokens_per_second": {str(ranks): round(rate * 1e9 / flops, 1) for ranks, rate in gflops.items()},
        },
        "load_average": list(load),
        "notes": [*NOTES, *left_out(every), *_machine_notes(every, load)],
        "environment": environment | {"packages": packages},
    }


def _ratios(
    every: Sequence[Contender], rates: dict[tuple[str, float], list[float]], dropout: float
) -> dict[str, dict[str, Any]]:
    """Everyone to our serial, and each of our layouts to every peer of as many ranks."""
    present = [contender for contender in every if (contender.name, dropout) in rates]

    def ratio(one: Contender | str, other: Contender | str) -> float:
        names = [side if isinstance(side, str) else side.name for side in (one, other)]
        return round(median_ratio(rates[names[0], dropout], rates[names[1], dropout]), 4)

    return {
        "to_serial": {contender.name: ratio(contender, SERIAL) for contender in present},
        "ours_to_peer": {
            peer.name: {
                ours.name: ratio(ours, peer) for ours in present if ours.is_ours and ours.ranks == peer.ranks
            }
            for peer in present
            if not peer.is_ours
        },
    }  # fmt: skip


def _losses(measured: Measured) -> list[dict[str, Any]]:
    """First and last loss of each contender's first round; null where it is not a number."""
    found = []
    for (name, dropout), rounds in measured.items():
        first, last = (loss if math.isfinite(loss) else None for loss in rounds[0].losses[:: len(rounds[0].losses) - 1])
        found.append({"name": name, "dropout": dropout, "first": first, "last": last})
    return found


def disagreements(every: Sequence[Contender], measured: Measured) -> list[str]:
    """A sentence for each contender whose losses are not those of our serial run.

    Compared are all losses of all rounds without dropout and, for our layouts, whose masks are equal, with it.
    """
    ours = {contender.name for contender in every if contender.is_ours}
    found = []
    for (name, dropout), rounds in measured.items():
        if dropout and name not in ours:
            continue
        expected = measured[SERIAL, dropout][0].losses
        gaps = [abs(a - b) for timed in rounds for a, b in zip(timed.losses, expected, strict=True)]
        if not all(gap <= TOLERANCE for gap in gaps):
            found.append(
                f"{name} computes something else with dropout {dropout:g}: its losses differ from those of "
                f"{SERIAL} by up to {max(gaps):.4g}"
            )
    return found


def _has_transformers(every: Sequence[Contender]) -> bool:
    return any(contender.needs == "transformers" and contender.is_installed for contender in every)


def _machine_notes(every: Sequence[Contender], load: Sequence[float]) -> list[str]:
    """What on this machine makes the figures worse than they need be."""
    cores, ranks = available_cores(), max(contender.ranks for contender in every)
    notes = [f"{ranks} ranks shared {cores} processor core"] if cores < ranks else []
    if max(load) > cores + 1:
        notes.append(
            f"other work kept the machine busy: the load average was up to {max(load):.1f} on {cores} cores, so these "
            "figures are noisy and too low"
        )
    return notes
