"""Evaluation in detail: checkpoints by protocol, a text article by article, a last-word test example by example."""

import math
from collections.abc import Iterator, Sequence
from functools import partial

from lineage.evaluations import Evaluation
from lineage.files import Example, ExampleHead
from reports.curves import Curve, model_order
from reports.evaluations import with_models
from reports.exhibit import Exhibit, Section, Table
from reports.figures.curves import draw_articles
from reports.files import file_name
from reports.load import EXAMPLES, Reproduction
from reports.numbers import MISSING, exact, printable, show
from reports.reproduced import make_command, own_kind


def detail_section(reproduction: Reproduction) -> Section:
    """What the evaluations hold below their totals."""
    order = model_order(reproduction)
    named, head = with_models(reproduction.evaluations, order), reproduction.head
    exhibits = [
        *([_protocols(reproduction, named)] if named else []),
        *_articles(reproduction, named, order),
        *([_browser(reproduction, head, reproduction.examples)] if head and reproduction.examples else []),
    ]
    problems = reproduction.problems_of(EXAMPLES)
    if not head and not problems:
        problems.append(f"This reproduction keeps no examples ({EXAMPLES}).")
    title = "Evaluation by checkpoint, article and example"
    return Section("evaluation-detail", title, exhibits, problems)


def _protocols(reproduction: Reproduction, named: list[tuple[str, Evaluation]]) -> Exhibit:
    tasks = list(dict.fromkeys(result.task for _, result in named))
    rows: dict[tuple[str, str], dict[str, Evaluation]] = {}
    for model, result in named:
        rows.setdefault((model, result.checkpoint_digest), {})[result.task] = result
    shown = [
        (m, digest[:16], *(_headline(results.get(task)) for task in tasks)) for (m, digest), results in rows.items()
    ]
    data = [
        [result.kind, model, result.checkpoint_digest, result.task, exact(result.perplexity), exact(result.accuracy)]
        for model, result in named
    ]
    return Exhibit(
        "protocols",
        "Checkpoints by protocol",
        ["Accuracy where the protocol has one, otherwise its perplexity; an asterisk where only part was scored."],
        Table(("kind", "model", "checkpoint", "protocol", "perplexity", "accuracy"), data, 4),
        make_command(reproduction, "table-3"),
        tables=(Table(("model", "checkpoint", *tasks), shown, 2),),
    )


def _headline(result: Evaluation | None) -> str:
    if result is None:
        return MISSING
    value = show(result.perplexity) if result.accuracy is None else f"{100 * result.accuracy:.2f} %"
    return f"{value} *" if result.partial else value


def _articles(reproduction: Reproduction, named: list[tuple[str, Evaluation]], order: list[str]) -> Iterator[Exhibit]:
    """A figure for each protocol whose text has articles."""
    kind = own_kind(reproduction)
    for task in dict.fromkeys(result.task for _, result in named):
        blocks = {model: result.blocks for model, result in named if result.task == task and model in order}
        losses = {
            model: {place: block.loss for place, block in enumerate(mine) if block.loss is not None}
            for model, mine in blocks.items()
        }
        losses = {model: scored for model, scored in losses.items() if len(scored) > 1}
        if not losses:
            continue
        leader = list(losses)[-1]
        places = sorted(losses[leader], key=losses[leader].__getitem__)
        curves = []
        for model, scored in losses.items():
            if points := [(float(x), _perplexity(scored[at])) for x, at in enumerate(places) if at in scored]:
                curves.append(Curve(model, kind, order.index(model), *zip(*points, strict=True)))
        rows = [
            [kind, model, blocks[model][at].title, exact(loss)]
            for model, scored in losses.items() for at, loss in scored.items()
        ]  # fmt: skip
        ends = [
            f"{printable(blocks[leader][at].title.strip())} ({show(_perplexity(losses[leader][at]))})"
            for at in (places[0], places[-1])
        ]
        caption = [
            f"Articles in the order of {leader}: from {ends[0]} to {ends[1]}.",
            "The same model, the same tokenizer: how hard a text is differs by article.",
        ]
        yield Exhibit(
            f"articles-{file_name(task)}", f"Perplexity of each article, {printable(task)}", caption,
            Table(("kind", "model", "article", "nats per sub-word"), rows, 3), make_command(reproduction, "table-3"),
            partial(draw_articles, curves),
            f"Perplexity per sub-word of {len(places)} articles for {len(curves)} models. {caption[0]}",
        )  # fmt: skip


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def _browser(reproduction: Reproduction, head: ExampleHead, examples: Sequence[Example]) -> Exhibit:
    kind = own_kind(reproduction)
    rows = [
        [kind, str(one.index), one.context, one.target, model, "yes" if right else "no", exact(log_probability)]
        for one in examples
        for model, right, log_probability in zip(head.models, one.correct, one.log_probability, strict=True)
    ]
    counts = "; ".join(
        f"{model} {sum(one.correct[place] for one in examples):,} of {len(examples):,}"
        for place, model in enumerate(head.models)
    )
    return Exhibit(
        "examples",
        f"Examples of {printable(head.task)}",
        [
            f"Right: {counts}. Under each model: whether its most likely continuation was the target word, and the "
            "log-probability of that word in nats."
        ],
        Table(("kind", "index", "context", "target", "model", "correct", "log_probability"), rows, 6),
        make_command(reproduction, "table-3"),
    )
