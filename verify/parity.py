"""Layouts that are compared with the serial run, and their names. Imports no torch."""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import get_args

from mlm_repro.engine.config import GPT2Config, ParallelConfig, RunConfig
from mlm_repro.engine.pipeline.schedule import ScheduleName
from mlm_repro.engine.run.resolved import checked_layout
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.config import parse_config
from mlm_repro.lineage.errors import BadInput

TOLERANCE = 1e-10
"""Largest allowed absolute difference from the serial run, in float64, of any element of any
tensor."""

PARTS: dict[str, JSON] = {
    **{name: {"schedule": name} for name in get_args(ScheduleName)},
    "recompute": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "sp": {"sequence_parallel": True},
    "zero1": {"shard_optimizer": True},
}
"""Part of a layout's name that has no number → the settings that it stands for."""
NAMED = {"tp", "pp", "chunks", *itertools.chain.from_iterable(PARTS.values())}
"""Keys of `[parallel]` that the name of a layout can set."""


class ParityLayout(ParallelConfig):
    """Layout, by default the serial one, of a training that is compared with the serial training:
    the number of ranks of each axis (tp, pp, dp, cp, ep, fsdp), the sequences per microbatch, the
    schedule and options such as recomputation. The property `name` states what differs from the
    serial run, such as `tp2-pp2-dp2-chunks2-sp-recompute`."""

    dp: int = 1
    cp: int = 1
    ep: int = 1
    """Degree of expert parallelism, over the data-parallel ranks."""
    fsdp: int = 1
    """Number of ranks over which parameters and batches are divided; `dp` counts copies of such
    groups."""
    mb: int = 0
    """Sequences per microbatch; 0 for the configuration's number."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the layout, tp · pp · dp · cp · fsdp; experts are divided over ranks
        that these already count."""
        return self.tp * self.pp * self.dp * self.cp * self.fsdp

    @property
    def is_of_ranks(self) -> bool:
        """True if the layout says how ranks divide the work and no more: its schedule is 1F1B, and
        it has no recomputation and no size of microbatches."""
        return (self.schedule, self.recompute, self.mb) == ("1f1b", "none", 0)

    @property
    def name(self) -> str:
        """Name of the layout, such as `tp2-sp`: the sizes and settings that differ from the serial
        run, that a name can state, and that its other parts do not imply, as `ep2` implies dp 2;
        `serial` if none differs. The function `parse_layout` gives the layout back."""
        sizes = {axis: getattr(self, axis) for axis in ("tp", "pp", "dp", "fsdp", "cp", "ep")}
        unsaid = {"dp": 1 if self.fsdp > 1 else self.ep}
        axes = [f"{axis}{size}" for axis, size in sizes.items() if size != unsaid.get(axis, 1)]
        # Chunks imply the schedule, which is interleaved.
        if self.chunks > 1:
            order = f"chunks{self.chunks}"
        else:
            order = "" if self.schedule == "1f1b" else self.schedule
        recompute = {"none": "", "selective": "selective", "full": "recompute"}[self.recompute]
        parts = [
            *axes,
            f"mb{self.mb}" * bool(self.mb),
            order,
            "sp" * self.sequence_parallel,
            "zero1" * self.shard_optimizer,
            recompute,
        ]
        return "-".join(part for part in parts if part) or "serial"

    def configure(self, config: RunConfig) -> RunConfig:
        """Return a copy of `config`, a RunConfig of this suite's engine, with the layout's settings
        under `parallel`: those named in `NAMED`, such as tp, pp and schedule. Data parallelism
        follows from the number of ranks; `dp`, `cp`, `ep` and `fsdp` are left out. Raises BadInput
        if the layout sets the size of microbatches."""
        if self.mb:
            raise BadInput(
                "mb, the size of microbatches in a layout's name, is for `mlm-verify layouts"
                " megatron-core` alone: leave it out"
            )
        parallel = config.parallel.model_copy(update={name: getattr(self, name) for name in NAMED})
        return config.model_copy(update={"parallel": parallel})


SERIAL = ParityLayout()


def parse_layout(text: str) -> ParityLayout:
    """Return the ParityLayout that `text` names: `serial`, or parts with `-` between them, in any
    order, such as `tp2-sp`. A part is tp, pp, dp, cp, ep, fsdp, chunks or mb with a number from 1
    to 999999 after it, or a key of PARTS, such as sp, recompute or the name of a schedule. Without
    `dp` or `fsdp` in the name, `ep` is the number of data-parallel ranks too; several chunks
    without a schedule mean the interleaved one. Raises BadInput for an unknown part, for a part
    that sets what an earlier one sets, such as gpipe after 1f1b, and for several chunks with a
    schedule that is not interleaved."""
    if text == "serial":
        return SERIAL
    values: JSON = {}
    for part in text.split("-"):
        sized = re.fullmatch(r"(tp|pp|dp|cp|ep|fsdp|chunks|mb)([1-9]\d{0,5})", part)
        given = {sized[1]: int(sized[2])} if sized else PARTS.get(part)
        if given is None:
            like = "tp2-pp2-dp2-chunks2-sp-recompute"
            raise BadInput(
                f"{text!r} is not a layout: {part!r} is not a part of a name such as {like}"
            )
        if given.keys() & values.keys():
            raise BadInput(
                f"{text!r} is not a layout: {part!r} sets again what a part before it sets: leave"
                " one of the two out"
            )
        values |= given
    values.setdefault("dp", 1 if "fsdp" in values else values.get("ep", 1))
    if values.get("chunks", 1) > 1:
        values.setdefault("schedule", "interleaved")
    return parse_config(values, ParityLayout, text)


def all_layouts(ranks: int) -> Iterator[ParityLayout]:
    """Yield a ParityLayout for every tp × pp × dp of at most `ranks`, with every schedule, and with
    and without sequence parallelism, a divided optimizer and full recomputation, where these change
    something; no model is asked whether it fits. If `ranks` is above 8, sizes are powers of 2.

    The serial run is left out. Axes such as `cp` stay 1, the interleaved schedule has two chunks
    per rank; `selective` recomputation and more chunks are available by name.
    """
    sizes = [size for size in range(1, ranks + 1) if ranks <= 8 or size.bit_count() == 1]
    orders = ("1f1b", 1), ("gpipe", 1), ("interleaved", 2)
    for tp, pp, dp, (schedule, chunks), sequence_parallel, sharded, recompute in itertools.product(
        sizes, sizes, sizes, orders, (False, True), (False, True), ("none", "full")
    ):
        # Options that change nothing on these sizes would only repeat a layout.
        is_double = (
            (pp == 1 and schedule != "1f1b")
            or (tp == 1 and sequence_parallel)
            or (dp == 1 and sharded)
        )
        layout = ParityLayout.model_validate(
            {
                "tp": tp,
                "pp": pp,
                "dp": dp,
                "schedule": schedule,
                "chunks": chunks,
                "recompute": recompute,
                "sequence_parallel": sequence_parallel,
                "shard_optimizer": sharded,
            }
        )
        if tp * pp * dp <= ranks and not is_double and layout != SERIAL:
            yield layout


def misfit(layout: ParityLayout, config: RunConfig) -> str:
    """Return in words the reason that the layout is not compared here: it does not fit the
    configuration, or it has cp, ep or fsdp, which `mlm-verify layouts` alone takes, even if the
    configuration can run on it. Empty if it is compared."""
    if layout.cp * layout.ep * layout.fsdp > 1:
        return "layouts with cp, ep or fsdp are for `mlm-verify layouts` alone"
    try:
        checked_layout(layout.configure(config), layout.world_size)
    except BadInput as error:
        return str(error)
    return ""


def comparable_layout(config: RunConfig, layout: str) -> ParityLayout:
    """Return the ParityLayout that the text `layout` names, on which two engines are compared; the
    other engine may still refuse it. Raises BadInput for a text that names no layout, for a layout
    that has cp, ep, fsdp or mb or does not fit `config`, and for a `config` that is not compared
    with other engines: only a GPT-2 without options, with Adam, a batch that does not grow and the
    precision fp32 or bf16 is."""
    if (
        config.model.section != GPT2Config()
        or config.train.optimizer != "adam"
        or config.train.rampup_batch_size
    ):
        raise BadInput(
            "only a GPT-2 without options in model.gpt2, with train.optimizer = adam and without"
            " train.rampup_batch_size, can be compared with another engine"
        )
    if config.train.precision not in ("fp32", "bf16"):
        raise BadInput(
            f"train.precision = {config.train.precision} is not compared with another engine: --set"
            " train.precision=fp32 or bf16"
        )
    chosen = parse_layout(layout)
    if reason := misfit(chosen, config):
        raise BadInput(
            f"{chosen.name} does not fit: {reason}; change that, or take another layout by --layout"
        )
    return chosen


def choose_layouts(
    names: str, ranks: int, config: RunConfig
) -> tuple[list[ParityLayout], dict[str, list[ParityLayout]]]:
    """Return a pair: a list of the layouts to compare, and a dict from each reason why layouts do
    not fit `config` to a list of the layouts left out for it. `names` is `all` or a text of
    layouts' names with commas between. With `all` the list has the layouts from `all_layouts`, of
    at most `ranks` ranks, that fit, fewest ranks first. Otherwise it has the named layouts in the
    order of the text, each once, and the dict is empty.

    Raises BadInput for a name that is no layout's, and if a layout that was named does not fit,
    needs more than `ranks`, or is the serial run.
    """
    if names == "all":
        by_reason = defaultdict(list)
        for layout in all_layouts(ranks):
            by_reason[misfit(layout, config)].append(layout)
        return sorted(by_reason.pop("", []), key=lambda layout: layout.world_size), by_reason
    chosen = list(dict.fromkeys(parse_layout(name.strip()) for name in names.split(",")))
    for layout in chosen:
        if layout == SERIAL:
            raise BadInput(
                "--layouts names the serial run itself (serial, or sizes of 1), with which each"
                " layout is compared: leave it out"
            )
        if layout.world_size > ranks:
            raise BadInput(
                f"{layout.name} needs {layout.world_size} ranks and --ranks allows {ranks}"
            )
        if reason := misfit(layout, config):
            raise BadInput(
                f"{layout.name} does not fit: {reason}; change that, or leave this layout out of"
                " --layouts"
            )
    return chosen, {}
