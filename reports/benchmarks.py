"""Results of `mlm-bench` as exhibits: tables of ratios beside their goals, and figures."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from markupsafe import Markup

from lineage.errors import BadInput, IntegrityFailure, UserError
from reports.benchmark_results import (
    KINDS,
    TOLERANCE,
    Benchmark,
    Data,
    DataScale,
    Eval,
    Gemm,
    Growth,
    Kernels,
    LearningRate,
    Parallel,
    Pipeline,
    Train,
)
from reports.exhibit import Draw, Exhibit, Section, Table
from reports.files import Problem, one_line, read_json
from reports.numbers import MISSING, percent, printable, show, size_bytes
from reports.pipelines import PLAN_RULE, bubble_table, timeline_alt, timeline_data
from reports.speed import (
    goal_alt,
    goal_caption,
    goal_data,
    goal_table,
    growth_alt,
    growth_caption,
    growth_data,
    growth_table,
    kernel_table,
    rate_table,
)
from reports.sweeps import (
    gemm_alt,
    gemm_caption,
    gemm_data,
    gemm_table,
    rate_curve_alt,
    rate_curve_caption,
    rate_curve_data,
    rate_curve_table,
)


@dataclass(frozen=True)
class Benchmarks:
    """A folder of results; a sentence for each file that cannot be used."""

    name: str
    exhibits: tuple[Exhibit, ...]
    problems: tuple[Problem, ...]
    commits: tuple[str, ...]
    """Of the code that was measured, one for each exhibit."""

    @property
    def section(self) -> Section:
        """Its part of the page."""
        return Section("benchmarks", "Benchmarks", self.exhibits, problems=[one.sentence for one in self.problems])


TITLES = {
    "data": "Data pipeline beside the libraries it replaces",
    "data-scale": "Data pipeline against the size of its input",
    "eval": "Evaluation beside the plain loop and lm-evaluation-harness",
    "gemm": "Matrix products around multiples of 8",
    "growth": "Growth of the cost of training",
    "kernels": "Compiled kernels beside what they replace",
    "learning-rate": "Learning-rate finder",
    "parallel": "Training throughput",
    "pipeline": "Pipeline schedules, planned and measured",
    "train": "Training beside nanoGPT and the core's limit",
}


def load_benchmarks(directory: Path) -> Benchmarks:
    """Every JSON file of a folder. Raises BadInput if it is not a folder."""
    if not directory.is_dir():
        raise BadInput(f"{directory} is not a directory of benchmark results")
    found: list[Exhibit] = []
    problems, commits = [], []
    for path in sorted(directory.glob("*.json")):
        try:
            kind = _kind(path)
            names = {one.name for one in found}
            name = f"bench-{kind}" if f"bench-{kind}" not in names else f"bench-{kind}-{len(names) + 1}"
            result = read_json(path, KINDS[kind])
            found.append(_exhibit(name, kind, result))
            commits.append(str(result.environment.source.get("commit") or ""))
        except UserError as error:
            problems.append(Problem("benchmarks", f"A benchmark cannot be shown: {error}.", damaged=True))
    if not found and not problems:
        problems.append(Problem("benchmarks", f"There are no benchmark results in {directory.name}.", damaged=False))
    resolved = directory.resolve()
    return Benchmarks(f"{resolved.parent.name}/{resolved.name}", tuple(found), tuple(problems), tuple(commits))


def _kind(path: Path) -> str:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise IntegrityFailure(f"{path.name} cannot be read: {one_line(error)}") from error
    kind = content.get("benchmark") if isinstance(content, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise IntegrityFailure(f"{path.name} is no result of a benchmark known here ({', '.join(KINDS)})")
    return kind


def _exhibit(name: str, kind: str, result: Benchmark) -> Exhibit:
    draw: Draw | None = None
    data: Table | None = None
    caption: list[str] = []
    alt = ""
    match result:
        case DataScale():
            from reports.figures import data_scale

            tables, caption = [_scale_table(result)], _scale_caption(result)
            alt = f"Two line charts over input size. {' '.join(caption)}"
            draw = partial(data_scale.draw, result)
        case Data():
            tables = [_data_table(result)]
        case Eval():
            tables = [_eval_table(result), _memory_table(result)]
        case Parallel():
            tables = [_parallel_table(result)]
        case Pipeline(timelines=timelines):
            from reports.figures import pipeline_schedule

            tables, caption, data = [bubble_table(timelines)], [PLAN_RULE], timeline_data(timelines, "measured")
            caption.append(f"Load average of the machine meanwhile: up to {max(result.load_average):.1f}.")
            alt, draw = timeline_alt(timelines), partial(pipeline_schedule.draw, timelines)
        case Train():
            from reports.figures import goals

            tables, data, caption = [goal_table(result), rate_table(result)], goal_data(result), goal_caption(result)
            alt, draw = goal_alt(result), partial(goals.draw, result)
        case Kernels():
            tables = [kernel_table(result)]
        case Gemm():
            from reports.figures import gemm

            tables, data, caption = [gemm_table(result)], gemm_data(result), gemm_caption(result)
            alt, draw = gemm_alt(result), partial(gemm.draw, result)
        case LearningRate():
            from reports.figures import learning_rate

            tables, data, caption = [rate_curve_table(result)], rate_curve_data(result), rate_curve_caption(result)
            alt, draw = rate_curve_alt(result), partial(learning_rate.draw, result)
        case Growth():
            from reports.figures import growth

            tables, data, caption = [growth_table(result)], growth_data(result), growth_caption(result)
            alt, draw = growth_alt(result), partial(growth.draw, result)
        case _:
            raise IntegrityFailure(f"there is no page for {kind}")
    shown = tuple(table for table in tables if table.rows)
    caption.append(f"Measured on {_where(result)}.")
    command = shlex.join(result.environment.argv)
    return Exhibit(name, TITLES[kind], caption, data or tables[0], command, draw, alt, shown, _notes(result.notes))


def _where(result: Benchmark) -> str:
    machine = result.environment
    commit = str(machine.source.get("commit") or "")[:12]
    where = ", ".join(part for part in (machine.cpu, f"{machine.cores} cores" if machine.cores else "") if part)
    return (where or "hardware not recorded") + (f"; code {commit}" if commit else "")


def _notes(notes: Sequence[str]) -> Markup:
    if not notes:
        return Markup("")
    lines = Markup("").join(Markup("<li>{}</li>").format(printable(note)) for note in notes)
    return Markup('<details class="numbers"><summary>How it was measured</summary><ul>{}</ul></details>').format(lines)


def _data_table(result: Data) -> Table:
    rows = [
        (one.stage, one.library, f"{one.megabytes_per_second:,.1f}", show(one.core_hours),
         *_against(one.ratio, one.goal), f"{one.compared:,}", f"{one.differing:,}")
        for one in result.stages
    ]  # fmt: skip
    whole, peer = result.whole, result.datatrove
    rate = MISSING if whole.megabytes_per_second is None else f"{whole.megabytes_per_second:,.1f}"
    rows.append(
        ("whole", "the plain stages together", rate, show(whole.core_hours),
         *_against(whole.ratio, whole.goal), f"{whole.documents:,}", f"{whole.differing:,}")
    )  # fmt: skip
    beside = f"datatrove {peer.version}" if peer.status == "measured" else f"datatrove: {peer.status}"
    rows.append(("its equivalents", beside, MISSING, MISSING, *_against(peer.ratio, peer.goal), MISSING, MISSING))
    heads = ("stage", "beside", "MB/s", "hours for 174 GB", "times faster", "goal", "compared", "differing")
    return Table(heads, rows, 2)


def _eval_table(result: Eval) -> Table:
    rows = []
    for one in result.comparisons:
        named = (one.name, one.size, one.rival if one.status == "measured" else f"{one.rival}: {one.status}")
        seconds = (show(one.median_seconds.get("ours")), show(one.median_seconds.get("theirs")))
        rows.append((*named, *seconds, *_against(one.times_faster, one.goal)))
    return Table(("requests", "model", "beside", "ours, s", "theirs, s", "times faster", "goal"), rows, 3)


def _memory_table(result: Eval) -> Table:
    rows = [
        (one.size, f"plain loop, batch {one.plain_batch_size}", size_bytes(one.peak_bytes.get("ours")),
         size_bytes(one.peak_bytes.get("plain loop")), percent(one.share, 1),
         f"{one.goal:.0%}{'' if one.share <= one.goal else ' missed'}")
        for one in result.memory
    ]  # fmt: skip
    return Table(("model", "beside", "our peak memory", "theirs", "share", "goal"), rows, 2)


def _parallel_table(result: Parallel) -> Table:
    rows = []
    for one in result.contenders:
        ratio = result.ratios.get(f"dropout {one.dropout:g}", {}).get("to_serial", {}).get(one.name)
        name = f"{one.name} (ours)" if one.is_ours else one.name
        rates = one.tokens_per_second
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}" if rates else MISSING
        median = one.status if one.median is None else f"{one.median:,.0f}"
        share = MISSING if one.gemm_share is None else percent(one.gemm_share, 1)
        times = f"{ratio:.2f}" if isinstance(ratio, int | float) else MISSING
        rows.append((name, f"{one.dropout:g}", str(one.ranks), median, spread, times, share))
    heads = ("contender", "dropout", "ranks", "median tokens/s", "least to most", "to serial", "share of limit")
    return Table(heads, rows, 1)


def _scale_table(result: DataScale) -> Table:
    rows = [
        (f"{row.megabytes:,.1f}", f"{row.documents:,}", f"{row.cpu_seconds:,.1f}", f"{row.megabytes_per_second:.2f}",
         size_bytes(row.peak_bytes), size_bytes(result.bound_of(row)))
        for row in result.rows
    ]  # fmt: skip
    return Table(("input, MB", "documents", "processor s", "MB/s per core", "peak memory", "bound"), rows, 0)


def _scale_caption(result: DataScale) -> list[str]:
    rates = [row.megabytes_per_second for row in result.rows]
    spread = max(rates) / min(rates) - 1
    within = all(row.peak_bytes <= result.bound_of(row) for row in result.rows)
    inside = "within" if spread <= TOLERANCE else "not within"
    return [
        f"With {result.workers} worker{'s' if result.workers != 1 else ''}, the fastest size is {spread:.1%} above the "
        f"slowest, {inside} {TOLERANCE:.0%}; the band stands around the median.",
        f"Peak memory is {'under' if within else 'not under'} the stated bound at every size.",
    ]


def _against(ratio: float | None, goal: float | None) -> Sequence[str]:
    if ratio is None:
        return MISSING, MISSING if goal is None else f"{goal:g}"
    return f"{ratio:.2f}", MISSING if goal is None else f"{goal:g}{'' if ratio >= goal else ' missed'}"
