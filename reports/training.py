"""Training on the page: curves, memory and pipelines of the runs that a reproduction keeps."""

from collections.abc import Mapping, Sequence
from functools import partial

from engine.run.files import Computation, Timeline
from lineage.numbers import size_bytes
from lineage.records import Kind
from reports.curves import Curve, model_order
from reports.exhibit import Exhibit, Section, Table
from reports.figures import pipeline_schedule
from reports.figures.curves import draw_panels
from reports.files import file_name
from reports.load import CURVES, Reproduction, Training
from reports.numbers import exact, percent, show

OF_STEPS = [field for field in CURVES if field != "perplexity"]
UTILISATION = "share of matrix products’ rate"


def training_section(reproduction: Reproduction) -> Section:
    """The training section, with models from the smallest to the largest."""
    kind, command = reproduction.own_kind, reproduction.command("training-loss")
    order = model_order(reproduction)
    trainings = {name: reproduction.trainings[name] for name in order if name in reproduction.trainings}
    ranks = {name: order.index(name) for name in trainings}
    limits = {model.name: model.matrix_gflops for model in reproduction.summary.models if model.matrix_gflops}
    drawn = {name: training for name, training in trainings.items() if training.steps}
    exhibits = [
        *([curves_exhibit(drawn, ranks, kind, limits, command)] if drawn else []),
        *_memory(trainings, kind, command),
        *pipeline_exhibits(trainings, kind, command),
    ]
    problems = [problem.sentence for training in trainings.values() for problem in training.problems]
    if not trainings:
        problems.append("This reproduction keeps no curves of its training runs (training/MODEL/metrics.jsonl).")
    return Section("training", "Training", exhibits, problems)


def curves_exhibit(
    trainings: Mapping[str, Training],
    ranks: Mapping[str, int],
    kind: Kind,
    limits: Mapping[str, float],
    command: str = "",
) -> Exhibit:
    """Six panels with a curve for each run; `ranks` gives the place that decides its look.

    `limits` has the rate of matrix products alone on a model's ranks, in 10⁹ operations per second.
    """
    panels: dict[str, list[Curve]] = {}
    for field, title in CURVES.items():
        drawn = [Curve(name, kind, ranks[name], *training.points(field)) for name, training in trainings.items()]
        if curves := [curve for curve in drawn if curve.x]:
            panels[title] = curves
    ends = [f"{curve.series} from {show(curve.y[0])} to {show(curve.final)}" for curve in panels[CURVES["loss"]]]
    caption = [
        f"Training loss, in nats per token: {'; '.join(ends)}.",
        "Faint lines are what was recorded, strong ones a running mean.",
    ]
    if all(limits.get(name) for name in trainings):
        rates = panels.pop(CURVES["model_tflops"])
        panels[UTILISATION] = [
            Curve(c.series, kind, c.rank, c.x, tuple(1e3 * y / limits[c.series] for y in c.y)) for c in rates
        ]
        reached = "; ".join(f"{name} {show(limits[name])}" for name in trainings)
        caption.append(
            "The last panel is the model's arithmetic, which has the whole of attention, over what fp32 matrix "
            f"products alone reach on as many ranks: {reached} GFLOP/s."
        )
    return Exhibit(
        "training-curves",
        "How training went",
        caption,
        _curves_data(trainings, kind),
        command,
        partial(draw_panels, panels),
        f"{len(panels)} line charts over iterations: {', '.join(panels)}. {caption[0]}",
    )


def _curves_data(trainings: Mapping[str, Training], kind: Kind) -> Table:
    rows = []
    for name, training in trainings.items():
        validated = {validation.iteration: validation.perplexity for validation in training.validations}
        steps = {step.iteration: step for step in training.steps}
        for iteration in sorted({*validated, *steps}):
            values = [getattr(steps[iteration], field) if iteration in steps else None for field in OF_STEPS]
            rows.append([kind, name, str(iteration), *map(exact, values), exact(validated.get(iteration))])
    return Table(("kind", "model", "iteration", *OF_STEPS, "validation_perplexity"), rows, 2)


def _memory(trainings: Mapping[str, Training], kind: Kind, command: str) -> Sequence[Exhibit]:
    summaries = {name: training.summary for name, training in trainings.items() if training.summary}
    memories = {name: own.memory for name, own in summaries.items() if own.memory and own.memory.measured_bytes}
    if not memories:
        return ()
    rows, data = [], []
    for name, memory in memories.items():
        peak, formula = max(memory.measured_bytes), memory.closed_form_bytes
        sizes = (size_bytes(formula), size_bytes(peak))
        rows.append((name, str(summaries[name].layout), memory.measured_by, *sizes, percent(peak, formula)))
        data.append(["computed", name, "", str(formula)])
        data += [[kind, name, str(rank), str(value)] for rank, value in enumerate(memory.measured_bytes)]
    caption = [
        "The closed form counts the parameters, gradients, optimizer state and activations of the first pipeline rank;",
        "what is measured is how far a rank's memory grew from before the model was built to after one iteration,",
        "with all that the process took besides.",
    ]
    heads = ("model", "layout", "measured by", "closed form", "largest rank", "of the closed form")
    return [
        Exhibit(
            "rank-memory",
            "Memory per rank against the formula",
            caption,
            Table(("kind", "model", "rank", "bytes"), data, 2),
            command,
            tables=(Table(heads, rows, 3),),
        )
    ]


def pipeline_exhibits(trainings: Mapping[str, Training], kind: Kind, command: str) -> list[Exhibit]:
    """A figure for each run with a pipeline."""
    timelines = {name: t.timeline for name, t in trainings.items() if t.timeline and t.timeline.pp > 1}
    return [
        Exhibit(
            f"pipeline-{file_name(name)}",
            f"The pipeline of {name} in iteration {timeline.iteration:,}",
            [timeline_caption(timeline)],
            timeline_data(timeline, kind),
            command,
            partial(pipeline_schedule.draw, timeline),
            f"Bars of forward and backward passes by rank over time. {timeline_caption(timeline)}",
        )
        for name, timeline in timelines.items()
    ]


def timeline_caption(timeline: Timeline) -> str:
    """A sentence on the planned and the measured bubble."""
    return (
        f"{timeline.schedule} with {timeline.microbatches} microbatches: the plan, in which a backward pass takes "
        f"twice a forward pass and a message no time, is idle for {bubble(timeline.planned):.2f} of the busiest "
        f"rank's time; measured were {bubble(timeline.measured):.2f}."
    )


def timeline_data(timeline: Timeline, kind: Kind) -> Table:
    """A row for each computation, planned and measured."""
    sources: tuple[tuple[Kind, str, Sequence[Sequence[Computation]]], ...] = (
        ("computed", "forward passes", timeline.planned),
        (kind, "s", timeline.measured),
    )
    rows = [
        [timeline.schedule, what, str(rank), *map(str, computation[:3]), *map(exact, computation[3:]), unit]
        for what, unit, ranks in sources
        for rank, computations in enumerate(ranks)
        for computation in computations
    ]
    return Table(("schedule", "kind", "rank", "pass", "microbatch", "chunk", "start", "end", "unit"), rows, 2)


def bubble(ranks: Sequence[Sequence[Computation]]) -> float:
    """Idle time over the busiest rank's time, from the first start to the last end."""
    busiest = max(sum(end - start for *_, start, end in rank) for rank in ranks)
    begun, ended = min(rank[0][3] for rank in ranks), max(rank[-1][4] for rank in ranks)
    return (ended - begun) / busiest - 1.0 if busiest > 0 else 0.0
