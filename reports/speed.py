"""Speed of training: ratios beside their goals, compiled kernels, and growth beside the closed form."""

from statistics import median

from reports.benchmark_results import Growth, Kernels, Train
from reports.exhibit import Table
from reports.numbers import MISSING, exact, show


def goal_table(result: Train) -> Table:
    """Every ratio that has a goal: its median over rounds, and from least to most."""
    rows = []
    for case, name in result.goals:
        spread, missed = case.each_round[name], "" if case.reached[name] else " missed"
        rows.append(
            (case.case, result.measures.get(name, name), f"{case.ratios[name]:.2f}",
             f"{min(spread):.2f} to {max(spread):.2f}", f"{case.goals[name]:g}{missed}")
        )  # fmt: skip
    return Table(("case", "measure", "median", "least to most", "goal"), rows, 2)


def rate_table(result: Train) -> Table:
    """Tokens per processor second of every contender, and the limit."""
    names = list(result.cases[0].cpu_tokens_per_second)
    rows = [
        (one.case, *(show(median(one.cpu_tokens_per_second.get(name, [0.0]))) for name in names),
         show(one.limit_tokens_per_second))
        for one in result.cases
    ]  # fmt: skip
    return Table(("case", *names, "limit"), rows, 1, "tokens per processor second")


def goal_data(result: Train) -> Table:
    """A line for each round of each ratio."""
    rows = [
        (case.case, result.measures.get(name, name), str(number), exact(value), exact(case.goals.get(name)))
        for case in [*result.cases, result.layouts]
        for name, values in case.each_round.items()
        for number, value in enumerate(values, 1)
    ]
    return Table(("case", "measure", "round", "ratio", "goal"), rows, 2)


def goal_caption(result: Train) -> list[str]:
    """How many goals were reached, and which were not."""
    missed = [
        f"{case.case}, {result.measures.get(name, name)} ({case.ratios[name]:.2f}, goal {case.goals[name]:g})"
        for case, name in result.goals
        if not case.reached[name]
    ]
    count = len(result.goals)
    first = f"{count - len(missed)} of {count} goals were reached, by the median of {result.rounds} rounds."
    return [first, *([f"Missed: {'; '.join(missed)}."] if missed else [])]


def goal_alt(result: Train) -> str:
    """In words what the picture of the goals has."""
    return f"Each ratio as a share of its goal, with least and most of the rounds. {' '.join(goal_caption(result))}"


def kernel_table(result: Kernels) -> Table:
    """Milliseconds of each kernel, and how many times as long the others take."""
    rows = []
    for one in result.kernels:
        others = [one.ratios.get(name) for name in ("to_reference", "to_torch.compile")]
        times = [MISSING if ratio is None else f"{ratio:.2f}" for ratio in others]
        rows.append((one.kernel, show(one.milliseconds.get("ours")), *times))
    return Table(("kernel", "ours, ms", "reference ÷ ours", "torch.compile ÷ ours"), rows, 1)


def growth_table(result: Growth) -> Table:
    """Rate, prediction and their ratio at every point."""
    rows = [
        (one.axis, f"{one.value:,}", show(median(one.tokens_per_second)), show(one.predicted), f"{one.ratio:.2f}")
        for one in result.points
    ]
    return Table(("axis", "value", "measured tokens/s", "predicted", "measured ÷ predicted"), rows, 1)


def growth_data(result: Growth) -> Table:
    """A line for each round of each point, and one for its prediction."""
    rows: list[tuple[str, ...]] = []
    for one in result.points:
        rows.append((one.axis, "computed", str(one.value), "", exact(one.predicted)))
        for number, rate in enumerate(one.tokens_per_second, 1):
            rows.append((one.axis, "measured", str(one.value), str(number), exact(rate)))
    return Table(("axis", "kind", "value", "round", "tokens/s"), rows, 2)


def growth_caption(result: Growth) -> list[str]:
    """How far from the closed form each axis goes, and the machine's load."""
    parts = []
    for axis in dict.fromkeys(one.axis for one in result.points):
        same = [one.ratio for one in result.points if one.axis == axis]
        parts.append(f"{axis} {min(same):.2f} to {max(same):.2f}")
    return [
        f"Measured over predicted: {'; '.join(parts)}.",
        f"Load average of the machine meanwhile: up to {max(result.load_average):.1f}.",
    ]


def growth_alt(result: Growth) -> str:
    """In words what the picture of growth has."""
    return f"Tokens per second by axis, measured beside the closed form. {growth_caption(result)[0]}"
