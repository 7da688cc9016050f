"""Results of `mlm-bench` as exhibits: their tables, and a figure of what they have: schedules, curves or goals."""

import shlex
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lineage.benchmark import AGAINST, Benchmark, parse_benchmark, sentences, setting_lines, tables
from lineage.errors import BadInput, UserError
from lineage.files import LearningRate, Timeline, parse_document, read_values
from reports.exhibit import Draw, Exhibit, Section, Table
from reports.files import Problem, file_name
from reports.learning_rate import rate_curve_exhibit
from reports.markup import folded
from reports.numbers import exact, printable
from reports.pipelines import PLAN_RULE, timeline_alt, timeline_data

DATA_HEADS = ("case", "axis", "at", "contender", "measure", "unit", "kind", "round", "value", "goal")


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
        return Section(
            "benchmarks", "Benchmarks", self.exhibits, problems=[problem.sentence for problem in self.problems]
        )


def load_benchmarks(directory: Path) -> Benchmarks:
    """Every JSON file of a folder and every run of `mlm-verify against` in it. Raises BadInput if it is no folder."""
    if not directory.is_dir():
        raise BadInput(f"{directory} is not a directory of benchmark results")
    exhibits: list[Exhibit] = []
    problems, commits = [], []
    for path in sorted([*directory.glob("*.json"), *directory.glob(f"*/{AGAINST}")]):
        try:
            exhibit, commit = _read(path)
            taken = exhibit.name in {other.name for other in exhibits}
            exhibits.append(replace(exhibit, name=f"{exhibit.name}-{len(exhibits) + 1}") if taken else exhibit)
            commits.append(commit)
        except UserError as error:
            problems.append(Problem("benchmarks", f"A benchmark cannot be shown: {error}.", damaged=True))
    if not exhibits and not problems:
        problems.append(Problem("benchmarks", f"There are no benchmark results in {directory.name}.", damaged=False))
    resolved = directory.resolve()
    return Benchmarks(f"{resolved.parent.name}/{resolved.name}", tuple(exhibits), tuple(problems), tuple(commits))


def _read(path: Path) -> tuple[Exhibit, str]:
    """The exhibit and the commit of a file, which is a benchmark's or a learning-rate finder's."""
    values = read_values(path)
    if isinstance(values, dict) and values.get("benchmark") == "learning-rate":
        curve = parse_document(values, LearningRate, path.name)
        return rate_curve_exhibit("bench-learning-rate", curve), str(curve.environment.source.get("commit") or "")
    result = parse_benchmark(values, path.name)
    return _exhibit(result, path.name), str(result.environment.source.get("commit") or "")


def _exhibit(result: Benchmark, file: str) -> Exhibit:
    draw: Draw | None = None
    caption, alt, data = sentences(result), "", _data(result)
    timelines = [
        parse_document(case.timeline, Timeline, f"{file}, {case.name}") for case in result.cases if case.timeline
    ]
    if timelines:
        from reports.figures import pipeline_schedule

        draw, data = partial(pipeline_schedule.draw, timelines), timeline_data(timelines, "measured")
        caption, alt = [PLAN_RULE, *caption], timeline_alt(timelines)
    elif result.benchmark == "against":
        from reports.figures import against

        draw = partial(against.draw, result)
        alt = f"Differences of two engines in each iteration, under their tolerance. {' '.join(caption)}"
    elif any(case.axis for case in result.cases):
        from reports.figures import benchmark_curves

        draw = partial(benchmark_curves.draw, result)
        alt = f"What was measured along each axis, beside limits and closed forms. {' '.join(caption)}"
    elif any(ratio.goal is not None for case in result.cases for ratio in case.ratios):
        from reports.figures import goals

        draw = partial(goals.draw, result)
        alt = f"Each ratio as a share of its goal, with least and most of the rounds. {' '.join(caption)}"
    return Exhibit(
        f"bench-{file_name(result.benchmark)}",
        result.title,
        [printable(sentence) for sentence in (*result.disagreements, *caption)],
        data,
        shlex.join(result.environment.argv),
        draw,
        alt,
        tuple(Table(*rows) for rows in tables(result)),
        folded("How it was measured", [*setting_lines(result), *result.notes]),
    )


def _data(result: Benchmark) -> Table:
    """A line for each sample, and one for each round of each ratio or for its value."""
    rows = [
        (case.name, case.axis, exact(case.at), series.contender, series.measure, series.unit, series.kind, str(number),
         exact(value), "")
        for case in result.cases for series in case.series
        for number, value in enumerate(series.samples, 1)
    ]  # fmt: skip
    rows += [
        (case.name, case.axis, exact(case.at), "", ratio.name, "ratio", "measured", str(number), exact(value),
         exact(ratio.goal))
        for case in result.cases for ratio in case.ratios
        for number, value in enumerate(ratio.rounds or [ratio.value], 1)
    ]  # fmt: skip
    return Table(DATA_HEADS, rows, 7)
