"""Train a configuration serially and on layouts of ranks, processes or threads, and compare every tensor."""

import time

import torch

from engine.config import RunConfig
from engine.costs import parameter_count
from engine.launch.forked import run_forked
from engine.launch.threads import run_threads
from lineage.environment import memory_bytes
from lineage.errors import BadInput
from lineage.progress import announce
from verify.engines import Ours
from verify.parity import SERIAL, TOLERANCE, LayoutDiffers, choose_layouts
from verify.runner import Reference, hold, on_ranks, table_head, table_row, train, whole
from verify.work import with_samples, with_vocabulary

PATIENCE = 20
"""Time limit of a layout in multiples of the serial run's time, in addition to two minutes."""


def run_parity(config: RunConfig, names: str, ranks: int, iterations: int, threads: bool = False) -> None:
    """Compare the layouts `names` stands for with the serial run, a line each. Ranks are processes or `threads`.

    Threads take microbatches of one sequence.

    Raises LayoutDiffers for the first that is beyond the tolerance, BadInput for a layout that does not fit.
    """
    config, facts = with_vocabulary(config)
    changed = {"precision": "fp64"} | ({"microbatch_size": 1} if threads else {})  # more data-parallel ranks fit
    config = config.model_copy(update={"train": config.train.model_copy(update=changed)})
    chosen, others = choose_layouts(names, ranks, config, threads)
    for reason, layouts in others.items():
        print(f"does not fit: {reason}: {', '.join(layout.name for layout in layouts)}")
    if not chosen:
        raise BadInput(f"no layout of at most {ranks} ranks fits but the serial run")
    _check_memory(config, iterations)
    most = max(layout.world_size for layout in chosen)
    kind = "threads" if threads else "processes"
    announce(f"{1 + len(chosen)} trainings of {iterations} iterations in float64, on up to {most} {kind}")
    torch.set_num_threads(1)
    wrong: list[str] = []
    with with_samples(config, facts, iterations) as work:
        start = time.monotonic()
        serial = whole(on_ranks(train, Ours, work, SERIAL))
        seconds = time.monotonic() - start
        print(
            f"{config.name}: {iterations} iterations of {config.train.global_batch_size} sequences in float64; "
            f"the serial run took {seconds:.1f} s, the tolerance is {TOLERANCE:.0e}"
        )
        print(table_head(chosen), flush=True)
        reference = Reference(serial, dict.fromkeys(serial, TOLERANCE))
        patience, run = 120 + PATIENCE * seconds, run_threads if threads else run_forked
        for outcome in hold(train, Ours, work, chosen, reference, run=run, seconds=patience):
            finding = outcome.failure or next((row.sentence("the serial run") for row in outcome.beyond), "")
            print(table_row(outcome, chosen, "DIFFERS" if finding else "ok"))
            if finding:
                print(f"{'':12}  first: {finding}")
                wrong.append(f"layout {outcome.layout.name}: {finding}")
    if wrong:
        more = f" ({len(wrong) - 1} more of {len(chosen)} layouts differ)" if len(wrong) > 1 else ""
        raise LayoutDiffers(wrong[0] + more)
    print(f"{len(chosen)} layouts compute what the serial run computes, within {TOLERANCE:.0e} in float64")


def _check_memory(config: RunConfig, iterations: int) -> None:
    """Raise BadInput if the serial run's tensors would not fit in half of the memory."""
    model, available = config.model, memory_bytes()
    outputs = (12 * model.num_layers + 2) * config.train.global_batch_size * model.seq_length * model.hidden_size
    needed = 8 * iterations * (2 * outputs + 4 * parameter_count(model))
    if available and needed > available / 2:
        raise BadInput(
            f"the tensors of {iterations} iterations take {needed / 2**30:,.0f} GiB and half of the memory here is "
            f"{available / 2**31:,.0f}: --twin, a smaller train.global_batch_size or fewer --iterations make it less"
        )
