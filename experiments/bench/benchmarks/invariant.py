"""What it costs that no layout changes a bit: training with `train.invariant` beside the ordinary path."""

from dataclasses import replace
from functools import partial

from engine.config import ParallelConfig
from experiments.bench.contender import Contender, read_size
from experiments.bench.timing import NOTES, Rounds, in_turn, measure_contender, rates, ratio, series
from lineage.benchmark import Benchmark, Case
from lineage.progress import announce

GOALS = {("small", 1): 1.25, ("small", 2): 1.5}
"""Most that it may cost, by size and tensor-parallel ranks."""
DROPOUT = 0.1


def measure(rounds: Rounds = 3) -> Benchmark:
    """Tokens/s of training in virtual tensor-parallel ranks beside the ordinary path, on one rank and at tp 2."""
    sizes = "tiny", "twin", "small"
    announce(f"{rounds} rounds of {4 * len(sizes)} trainings, half of them on two processes")
    cases, load = [], list[float]()
    for name in sizes:
        for tp in (1, 2):
            case, during = _case(name, tp, rounds)
            cases.append(case)
            load += during
    return Benchmark(
        benchmark="invariant",
        title="The price of the same bits at every layout",
        cases=cases,
        notes=NOTES["invariant"],
        setting={"rounds": rounds, "dropout": DROPOUT},
        load_average=load,
    )


def _case(name: str, tp: int, rounds: int) -> tuple[Case, list[float]]:
    from experiments.bench.contenders.ours import build_ours

    size = read_size(name)
    virtual = size.model.num_heads & -size.model.num_heads
    in_virtual_ranks = replace(size, train=size.train.model_copy(update={"invariant": virtual}))
    contender = Contender(name, tp, build_ours, is_ours=True, parallel=ParallelConfig(tp=tp))
    both = {"ordinary": size, "invariant": in_virtual_ranks}
    jobs = {which: partial(measure_contender, contender, each, DROPOUT) for which, each in both.items()}
    measured, load = in_turn(f"{name}, tp {tp}", rounds, jobs)
    of = rates(size, measured)
    price = ratio(
        "time ÷ that of the ordinary path", of["ordinary"], of["invariant"], GOALS.get((name, tp)), less_is_better=True
    )
    every = [series(which, "rate", "tokens/s", *samples) for which, samples in of.items()]
    setting = size.describe() | {"virtual_ranks": virtual}
    return Case(name=f"{name}, tp {tp}", series=every, ratios=[price], setting=setting), load
