"""Evaluation results on the page: by convention of perplexity, by checkpoint and protocol, and article by article."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import exp, log

from evaluation.schema import ClozeResult, PerplexityResult, Result
from lineage.numbers import with_error
from reports.curves import Curve, model_order
from reports.exhibit import Exhibit, Section, Table
from reports.figures.curves import draw_articles
from reports.files import file_name
from reports.load import Reproduction
from reports.numbers import MISSING, exact, printable, show

CONVENTIONS = ("perplexity", "per sub-word", "per original word", "per lm-eval word", "bits per byte")
COLUMNS = (
    "task", "kind", "checkpoint_digest", "partial", "perplexity", "perplexity_standard_error",
    "log_perplexity_standard_error", "subword_perplexity", "original_token_perplexity", "lm_eval_word_perplexity",
    "bits_per_byte", "accuracy", "standard_error", "num_correct", "num_examples",
)  # fmt: skip
"""Fields of a result that the CSV lists; empty where a result of its kind has none."""
LAST_WORD = ("accuracy", "correct", "log-likelihood of the target, nats", "perplexity of the target")


def cells_of(result: Result) -> tuple[str, ...]:
    """Cells of the columns CONVENTIONS, or LAST_WORD for a last-word test."""
    first, error = with_error(result.perplexity, result.spread), result.log_perplexity_error
    if isinstance(result, PerplexityResult):
        words = (result.subword_perplexity, result.original_token_perplexity, result.lm_eval_word_perplexity)
        return (first, *map(show, words), with_error(result.bits_per_byte, result.bits_per_byte_error))
    assert isinstance(result, ClozeResult)
    accuracy = f"{100 * result.accuracy:.2f} ± {100 * result.standard_error:.2f} %"
    correct = f"{show(result.num_correct)} of {show(result.num_examples)}"
    return accuracy, correct, with_error(-log(result.perplexity), error), first


def with_models(evaluations: Mapping[str, Result], order: Sequence[str]) -> list[tuple[str, Result]]:
    """Results with their models in the models' order; a file stem begins with the model's name."""
    named = [(stem.removesuffix(f"-{result.task}"), result) for stem, result in evaluations.items()]
    places = {name: place for place, name in enumerate(order)}
    return sorted(named, key=lambda pair: (places.get(pair[0], len(places)), pair[0]))


def by_protocol(evaluations: Mapping[str, Result], order: Sequence[str]) -> list[tuple[str, Result]]:
    """Perplexities of texts, then last-word tests, by protocol and model."""
    return sorted(with_models(evaluations, order), key=lambda pair: (isinstance(pair[1], ClozeResult), pair[1].task))


def evaluations_tables(evaluations: Mapping[str, Result], order: Sequence[str]) -> list[Table]:
    """The page's tables of perplexities by convention and of last-word tests."""
    tables = []
    for title, heads, is_cloze in (("Perplexity", CONVENTIONS, False), ("Last word", LAST_WORD, True)):
        rows = [
            (model, result.task, f"{result.kind}{', partial' if result.partial else ''}", *cells_of(result),
             result.checkpoint_digest[:16])
            for model, result in by_protocol(evaluations, order) if isinstance(result, ClozeResult) == is_cloze
        ]  # fmt: skip
        tables += [Table(("model", "protocol", "kind", *heads, "checkpoint"), rows, 3, title)] if rows else []
    return tables


def evaluations_data(evaluations: Mapping[str, Result]) -> Table:
    """A row for each result with numbers as recorded."""
    rows = [
        [stem, *("" if (v := getattr(evaluation, field, None)) is None else str(v) for field in COLUMNS)]
        for stem, evaluation in evaluations.items()
    ]
    return Table(["evaluation", *COLUMNS], rows, 3)


def evaluation_section(reproduction: Reproduction) -> Section:
    """A table of all checkpoints and protocols, and a figure for each text that has articles."""
    order = model_order(reproduction)
    named = with_models(reproduction.evaluations, order)
    exhibits = [*([_protocols(reproduction, named)] if named else []), *_articles(reproduction, named, order)]
    return Section("evaluation-detail", "Evaluation by checkpoint and article", exhibits)


def _protocols(reproduction: Reproduction, named: list[tuple[str, Result]]) -> Exhibit:
    tasks = list(dict.fromkeys(result.task for _, result in named))
    rows: dict[tuple[str, str], dict[str, Result]] = {}
    for model, result in named:
        rows.setdefault((model, result.checkpoint_digest), {})[result.task] = result
    shown = [
        (m, digest[:16], *(_headline(results.get(task)) for task in tasks)) for (m, digest), results in rows.items()
    ]
    data = [
        [
            result.kind,
            model,
            result.checkpoint_digest,
            result.task,
            exact(result.perplexity),
            exact(result.accuracy if isinstance(result, ClozeResult) else None),
        ]
        for model, result in named
    ]
    return Exhibit(
        "protocols",
        "Checkpoints by protocol",
        ["Accuracy where the protocol has one, otherwise its perplexity; an asterisk where only part was scored."],
        Table(("kind", "model", "checkpoint", "protocol", "perplexity", "accuracy"), data, 4),
        reproduction.command("table-3"),
        tables=(Table(("model", "checkpoint", *tasks), shown, 2),),
    )


def _headline(result: Result | None) -> str:
    if result is None:
        return MISSING
    value = f"{100 * result.accuracy:.2f} %" if isinstance(result, ClozeResult) else show(result.perplexity)
    return f"{value} *" if result.partial else value


def _articles(reproduction: Reproduction, named: list[tuple[str, Result]], order: list[str]) -> Iterator[Exhibit]:
    """A figure for each protocol whose text has articles."""
    kind = reproduction.own_kind
    for task in dict.fromkeys(result.task for _, result in named):
        blocks = {
            model: result.blocks
            for model, result in named
            if isinstance(result, PerplexityResult) and result.task == task and model in order
        }
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
            Table(("kind", "model", "article", "nats per sub-word"), rows, 3), reproduction.command("table-3"),
            partial(draw_articles, curves),
            f"Perplexity per sub-word of {len(places)} articles for {len(curves)} models. {caption[0]}",
        )  # fmt: skip


def _perplexity(loss: float) -> float:
    return exp(min(loss, 700.0))
