"""The tables of a benchmark's record, which the terminal and the documentation show. Imports no
torch."""

from statistics import median

from mlm_repro.experiments.benchmark import Benchmark, Table, setting_lines
from mlm_repro.lineage.numbers import MISSING, aligned, show, size_bytes

Medians = dict[tuple[str, str], float]
"""A measure's median by the pair of case and contender."""


def tables(result: Benchmark) -> list[Table]:
    """Return a list of the Tables of a benchmark's record in order: "ratios" with their goals, a
    Table of medians for each measure and unit, and "not measured" with the reasons. A table without
    rows is left out."""
    rows = []
    measures: dict[tuple[str, str], Medians] = {}
    missing = []
    for case in result.cases:
        for ratio in case.ratios:
            spread = goal = MISSING
            if len(ratio.rounds) > 1:
                spread = f"{min(ratio.rounds):.2f} to {max(ratio.rounds):.2f}"
            if ratio.goal:
                bound = "at most" if ratio.less_is_better else "at least"
                goal = f"{bound} {ratio.goal:g}{'' if ratio.is_reached else ', missed'}"
            rows.append((case.name, ratio.name, f"{ratio.value:.2f}", spread, goal))
        for contender in case.series:
            medians = measures.setdefault((contender.measure, contender.unit), {})
            medians[case.name, contender.contender] = float(median(contender.samples))
        missing += [(case.name, name, why) for name, why in case.missing.items()]
    every = [
        Table(("case", "ratio", "value", "rounds", "goal"), rows, 2, "ratios"),
        *(_measure_table(medians, *measure) for measure, medians in measures.items()),
        Table(("case", "contender", "why"), missing, 3, "not measured"),
    ]
    return [table for table in every if table.rows]


def sentences(result: Benchmark) -> list[str]:
    """Return a list of strings, each a whole sentence, that sum up a benchmark's record: how many
    goals were reached, if there are any; which were missed, with their ratios, if any were; the
    highest load of the machine, if it is known and not 0; and, always, the machine."""
    lines = []
    aimed = 0
    missed = []
    for case in result.cases:
        for ratio in case.ratios:
            aimed += ratio.goal is not None
            if not ratio.is_reached:
                missed.append(f"{case.name}, {ratio.name} ({ratio.value:.2f}, goal {ratio.goal:g})")
    if aimed:
        lines.append(f"{aimed - len(missed)} of {aimed} goals were reached.")
    if missed:
        lines.append(f"Missed: {'; '.join(missed)}.")
    where = result.environment
    load = max(result.load_average, default=0.0)
    if load:
        cores = f" on {where.cores} cores" if where.cores else ""
        lines.append(f"Load average of the machine meanwhile: up to {load:.1f}{cores}.")
    return [*lines, where.sentence]


def show_benchmark(result: Benchmark) -> None:
    """Print a benchmark's record to standard output: title, shared settings and tables, then one
    list, with sentences that sum up the record, with disagreements and with notes on the method."""
    print(result.title, *setting_lines(result), sep="\n")
    for table in tables(result):
        print(f"\n{table.title}", *aligned([table.heads, *table.rows]), sep="\n")
    print(
        *(f"- {line}" for line in (*sentences(result), *result.disagreements, *result.notes)),
        sep="\n",
    )


def _measure_table(medians: Medians, measure: str, unit: str) -> Table:
    """Return a Table of one measure's `medians`, a dict (case, contender) → median: cases down and
    contenders across, or the other way round if there are more contenders than cases. `unit` is
    that of the medians. The title is `measure`, with the unit unless it is bytes or empty. A dash
    stands where a contender has no median for a case."""
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
