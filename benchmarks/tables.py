"""The tables of a benchmark's record, which the terminal and the documentation show. Imports no
torch."""

from statistics import median

from mlm_repro.experiments.benchmark import Benchmark, Table, setting_lines
from mlm_repro.lineage.numbers import MISSING, aligned, show, size_bytes


def tables(result: Benchmark) -> list[Table]:
    """Make the tables: ratios with their goals, one for each measure, contenders that were not
    measured."""
    rows = []
    for case in result.cases:
        for ratio in case.ratios:
            spread = (
                f"{min(ratio.rounds):.2f} to {max(ratio.rounds):.2f}"
                if len(ratio.rounds) > 1
                else MISSING
            )
            bound = "at most" if ratio.less_is_better else "at least"
            goal = (
                f"{bound} {ratio.goal:g}{'' if ratio.is_reached else ', missed'}"
                if ratio.goal
                else MISSING
            )
            rows.append((case.name, ratio.name, f"{ratio.value:.2f}", spread, goal))
    every = [Table(("case", "ratio", "value", "rounds", "goal"), rows, 2, "ratios")]
    measures: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    for case in result.cases:
        for contender in case.series:
            medians = measures.setdefault((contender.measure, contender.unit), {})
            medians[case.name, contender.contender] = float(median(contender.samples))
    every += [_measure_table(medians, *measure) for measure, medians in measures.items()]
    missing = [
        (case.name, name, why) for case in result.cases for name, why in case.missing.items()
    ]
    every.append(Table(("case", "contender", "why"), missing, 3, "not measured"))
    return [table for table in every if table.rows]


def sentences(result: Benchmark) -> list[str]:
    """Sum up the record: goals reached and missed, other work on the machine, the machine."""
    lines = []
    aimed = [
        (case.name, ratio)
        for case in result.cases
        for ratio in case.ratios
        if ratio.goal is not None
    ]
    if aimed:
        missed = [
            f"{case}, {ratio.name} ({ratio.value:.2f}, goal {ratio.goal:g})"
            for case, ratio in aimed
            if not ratio.is_reached
        ]
        lines.append(f"{len(aimed) - len(missed)} of {len(aimed)} goals were reached.")
        lines += [f"Missed: {'; '.join(missed)}."] if missed else []
    where = result.environment
    load = max(result.load_average, default=0.0)
    if load:
        cores = f" on {where.cores} cores" if where.cores else ""
        lines.append(f"Load average of the machine meanwhile: up to {load:.1f}{cores}.")
    return [*lines, where.sentence]


def show_benchmark(result: Benchmark) -> None:
    """Print the shared settings, the tables, their summary and the method."""
    print(result.title, *setting_lines(result), sep="\n")
    for table in tables(result):
        print(f"\n{table.title}", *aligned([table.heads, *table.rows]), sep="\n")
    print(
        *(f"- {line}" for line in (*sentences(result), *result.disagreements, *result.notes)),
        sep="\n",
    )


def _measure_table(medians: dict[tuple[str, str], float], measure: str, unit: str) -> Table:
    """Return medians by case and contender: a row for each case, or for each contender if that is
    narrower."""
    cases, contenders = (list(dict.fromkeys(key[part] for key in medians)) for part in (0, 1))
    head = "case"
    down = cases
    across = contenders
    if len(contenders) > len(cases):
        head = "contender"
        down = contenders
        across = cases
        medians = {(contender, case): value for (case, contender), value in medians.items()}
    rows = [(row, *(_cell(medians.get((row, column)), unit) for column in across)) for row in down]
    title = measure if unit in ("", "bytes") else f"{measure}, {unit}"
    return Table((head, *across), rows, 1, title)


def _cell(value: float | None, unit: str) -> str:
    if value is None:
        return MISSING
    if unit == "bytes":
        return size_bytes(int(value))
    return show(int(value) if not unit and value.is_integer() else value)
