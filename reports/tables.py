"""Tables of the page and its CSV files."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, floor, log, log10
from pathlib import Path
from statistics import fmean
from typing import Any

from mlm_repro.data_pipeline.files import DataCard, Ledger, NearDuplicates
from mlm_repro.evaluation.schema import ClozeResult, PerplexityResult, Result
from mlm_repro.experiments.files import PARTIAL
from mlm_repro.experiments.reproduce.files import ReproducedModel
from mlm_repro.lineage.config import flatten, read_toml
from mlm_repro.lineage.numbers import MISSING, compact, exact, percent, show, size_bytes
from mlm_repro.lineage.progress import format_duration
from mlm_repro.lineage.records import Kind, Record
from mlm_repro.reports.exhibit import Table

BENCHMARKS = {
    "wikitext103_perplexity": ("WikiText-103 perplexity", "lower is better"),
    "lambada_accuracy": ("LAMBADA accuracy", "higher is better"),
}
AXES = read_toml(Path(__file__).with_name("axes.toml"))
"""Labels of quantities, positions, shapes and a training's curves, each a dict by name."""
SHAPE: dict[str, str] = AXES["shape"]
RECORD_FIELDS = (
    "experiment series quantity kind x_name x value low high unit source digest seed note".split()  # noqa: SIM905
)
EXACT = ("x", "value", "low", "high")
CONVENTIONS = (
    "perplexity",
    "per sub-word",
    "per original word",
    "per lm-eval word",
    "bits per byte",
)
COLUMNS = (
    "task",
    "kind",
    "checkpoint_digest",
    "partial",
    "perplexity",
    "perplexity_standard_error",
    "log_perplexity_standard_error",
    "subword_perplexity",
    "original_token_perplexity",
    "lm_eval_word_perplexity",
    "bits_per_byte",
    "accuracy",
    "standard_error",
    "num_correct",
    "num_examples",
)
"""Fields of a result that the CSV lists; a cell is empty if results of its kind lack the field."""
LAST_WORD = (
    "accuracy",
    "correct",
    "log-likelihood of the target, nats",
    "perplexity of the target",
)
OURS = "this reproduction"
MEANINGLESS = 10_000
"""Perplexity from which on the number is not shown, because it says nothing; bits per byte do."""


def comparison_tables(records: Sequence[Record]) -> list[Table]:
    """Return a list of a Table for each benchmark, WikiText-103 perplexity and LAMBADA accuracy,
    that has records: a row for each model, a column for each published source, and a last column
    for our models of the published size, if any was scored. Numbers of scaled twins are left
    out."""
    tables = []
    for quantity, (title, hint) in BENCHMARKS.items():
        cells = defaultdict(list)
        for record in records:
            if record.quantity == quantity and record.kind != "scaled":
                column = record.source if record.kind == "published" else OURS
                cells[record.series, column].append(record)
        if cells:
            series, columns = (dict.fromkeys(names) for names in zip(*cells, strict=True))
            heads = sorted(columns, key=(OURS,).count)
            text = "{:.2f} %".format if quantity.endswith("accuracy") else show
            rows = [
                [name, *(cell_of(cells[name, head], text) for head in heads)] for name in series
            ]
            tables.append(Table(("model", *heads), rows, 1, f"{title} ({hint})"))
    return tables


def chance(result: Result, vocab_size: int) -> dict[str, str]:
    """Return a dict quantity → text of the scores of an even guess over a vocabulary of
    `vocab_size` on the text of `result`. A quantity begins with the text's name. A last-word test
    has two, such as `lambada_accuracy`, "at most" a number in per cent, and
    `lambada_log_likelihood`, a negative number of nats a word; another has one, such as
    `wikitext103_bits_per_byte`. Empty if nothing was scored.

    A word is one sub-word or more, so a guess of a word is right at most as often as a guess of a
    sub-word.
    """
    text = result.task.removesuffix("-perplexity").replace("-", "_")
    if isinstance(result, ClozeResult):
        if not result.num_examples:
            return {}
        nats = result.num_scored_tokens / result.num_examples * log(vocab_size)
        return {
            f"{text}_accuracy": f"at most {100 / vocab_size:.2g}",
            f"{text}_log_likelihood": f"{-nats:,.3f}",
        }
    assert isinstance(result, PerplexityResult)
    if not result.loss_per_token:
        return {}
    return {
        f"{text}_bits_per_byte": (
            f"{result.bits_per_byte * log(vocab_size) / result.loss_per_token:,.3f}"
        )
    }


def cell_of(records: Sequence[Record], text: Callable[[float], str]) -> str:
    """Return the text of a table's cell with the values of `records`: each of them, with semicolons
    between, if they are published or if there is one alone, else their mean, minimum and maximum
    over our seeds; a dash without records. The function `text` formats a number. If only a part of
    the test was scored, the cell says so."""
    values = [record.value for record in records]
    if len(records) < 2 or records[0].kind == "published":
        shown = "; ".join(map(text, values)) or MISSING
    else:
        shown = (
            f"{text(fmean(values))} ({text(min(values))} to {text(max(values))} in {len(records)}"
            " seeds)"
        )
    return (
        f"{shown}, partial" if any(record.note.startswith(PARTIAL) for record in records) else shown
    )


def models_tables(models: Sequence[ReproducedModel], ours: Kind) -> list[Table]:
    """Return a list of two Tables of `models`, the models of a reproduction: one of published and
    trained shapes, for the first seed of each model alone, and one of training runs, with a row for
    each of `models`. `ours` is the text for our models in the column `kind`."""
    shapes = []
    for model in models:
        if model.name == model.series:
            for name, kind, shape in (
                (model.series, "published", model.published),
                (model.label, ours, model.trained),
            ):
                sizes = [_setting(key, getattr(shape, key)) for key in SHAPE]
                shapes.append((name, kind, *sizes))
    runs = [
        (
            model.label,
            ours,
            model.run or MISSING,
            show(model.tokens),
            MISSING if model.seed is None else str(model.seed),
            MISSING if model.train_seconds is None else format_duration(model.train_seconds),
            MISSING if model.tokens_per_second is None else f"{model.tokens_per_second:,.0f}",
            (model.checkpoint_digest or MISSING)[:16],
        )
        for model in models
    ]
    heads = ("model", "kind", "run", "tokens", "seed", "time", "tokens/s", "checkpoint")
    return [
        Table(("model", "kind", *SHAPE.values()), shapes, 2, "Published and trained shapes"),
        Table(heads, runs, 3, "Training runs"),
    ]


def attrition_table(ledger: Ledger) -> Table:
    """Return a Table, for people, of the `ledger` of a dataset. For each stage, in order, it has a
    row of the documents that the stage kept, then a row for each reason for dropping. A row states
    the stage, `kept` (with the stage's note, if any) or the reason, the number of documents, with a
    minus sign if they were dropped, their share of the documents that came to the stage, their
    bytes and their tokens. A row of kept documents also states how many documents the stage
    changed. Counts are in full, sizes in B, kB, MB or GB. An em dash stands for a number that is
    not known, and for a share if no document came."""
    rows = []
    for stage in ledger.stages:
        label = f"kept ({stage.note})" if stage.note else "kept"
        for reason, amount in {"": stage.kept, **stage.dropped}.items():
            rows.append(
                (
                    stage.name,
                    f"dropped: {reason}" if reason else label,
                    f"{'−' if reason else ''}{show(amount.documents)}",
                    percent(amount.documents, stage.documents_in),
                    size_bytes(amount.bytes),
                    show(amount.tokens),
                    "" if reason else show(stage.changed),
                )
            )
    heads = ("stage", "reason", "documents", "share of stage", "bytes", "tokens", "changed")
    return Table(heads, rows, 2, "Attrition")


def records_data(records: Iterable[Record], printed: Sequence[str] = ()) -> Table:
    """Return a Table with a row for each of `records`, in order, and a column for each field of a
    Record, headed by its name, with numbers as recorded. A cell is empty where the field is None.
    The first four columns, `experiment`, `series`, `quantity` and `kind`, count as words. `printed`
    has one text for each of the first rows, which stands there in the column `value`; by default it
    has none."""
    rows = [
        [(exact if field in EXACT else _plain)(getattr(record, field)) for field in RECORD_FIELDS]
        for record in records
    ]
    for row, digits in zip(rows, printed, strict=False):
        row[RECORD_FIELDS.index("value")] = digits
    return Table(RECORD_FIELDS, rows, 4)


def ledger_data(ledger: Ledger) -> Table:
    """Return a Table of a dataset's ledger. Its columns are the stage's name, the decision, `kept`
    or `dropped`, the reason, and the exact numbers of documents, bytes and tokens, empty where not
    known. Each stage in order has a row of what it kept, without a reason, and a row for each
    reason for dropping."""
    heads = ("documents", "bytes", "tokens")
    rows = []
    for stage in ledger.stages:
        for reason, amount in {"": stage.kept, **stage.dropped}.items():
            numbers = [_plain(getattr(amount, name)) for name in heads]
            rows.append([stage.name, "dropped" if reason else "kept", reason, *numbers])
    return Table(["stage", "decision", "reason", *heads], rows, 3)


def settings(card: DataCard) -> list[tuple[str, str]]:
    """Return a list of pairs (stage, its settings as one text, `name value; name value`) from the
    DataCard of a dataset, in the card's order; an empty list if the card has no settings. Names
    have spaces for underscores. A list's entries stand with commas between; an empty list is
    `none`."""

    def as_text(value: Any) -> str:
        return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)

    return [
        (
            stage,
            "; ".join(
                f"{name.replace('_', ' ')} {as_text(value)}" for name, value in setting.items()
            ),
        )
        for stage, setting in card.settings.items()
    ]


def near_duplicates(banding: NearDuplicates) -> list[str]:
    """Return a list of three or four sentences, as text, on a dataset's search for near-duplicates,
    from `banding`, the entry on it in the dataset's ledger: how it is set, how likely a pair of
    documents of a given similarity is compared, how many compared pairs reach the threshold and, if
    some documents were not compared with every earlier one, how many, and at most how many pairs
    that leaves out."""
    bins = len(banding.compared_pairs_by_similarity)
    first = ceil(round(banding.threshold * bins, 6))
    above = sum(banding.compared_pairs_by_similarity[first:])
    least = "" if abs(banding.threshold * bins - first) < 1e-6 else "at least "
    agreeing = (
        f" and at least {banding.min_agreement} equal minima" if banding.min_agreement else ""
    )
    recalls = [
        f"{'over 0.9999' if 0.9999 < value < 1 else f'{value:.4f}'} at {similarity}"
        for similarity, value in banding.expected_recall.items()
    ]
    return [
        (
            f"Near-duplicates are sought with {banding.bands} bands of {banding.rows}"
            f" rows{agreeing} of {banding.permutations} permutations over shingles of"
            f" {banding.shingle_characters} characters."
        ),
        (
            "The probability that a pair is compared, by its Jaccard similarity:"
            f" {', '.join(recalls)}."
        ),
        (
            f"Of the {banding.compared_pairs:,} pairs that were compared {least}{above:,}"
            f" ({percent(above, banding.compared_pairs)}) lie at or above the threshold of"
            f" {banding.threshold:g}."
        ),
        *([f"{banding.left_out}."] if banding.left_out else []),
    ]


def models_data(models: Sequence[ReproducedModel]) -> Table:
    """Return a Table with a row for each model of a reproduction, with all fields under their
    dotted names: the facts of its training, and its published and its trained configuration. There
    must be a model."""
    rows = [flatten(model.model_dump(mode="json")) for model in models]
    return Table([*rows[0]], [list(map(_plain, row.values())) for row in rows], 2)


def _setting(key: str, value: float | None) -> str:
    if value is None:
        return MISSING
    if key == "parameters":
        return compact(float(f"{value:.4g}"))
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _plain(value: Any) -> str:
    return "" if value is None else str(value)


def with_error(value: float | None, error: float | None) -> str:
    """Return a number as text with its standard error, both to the error's second digit; without an
    error, or with one of 0, as the function `show` writes the number, an em dash for None.

    For a number from 10,000 on, only "over 10,000" is returned.
    """
    if value is not None and value >= MEANINGLESS:
        return f"over {MEANINGLESS:,}"
    if value is None or not error:
        return show(value)
    digits = 1 - floor(log10(error))
    return " ± ".join(f"{round(number, digits):,.{max(digits, 0)}f}" for number in (value, error))


def cells_of(result: Result) -> tuple[str, ...]:
    """Return a tuple of the texts of the cells that an evaluation's result fills in a row of the
    page. A running text has five, in the order of CONVENTIONS: the perplexity of its own protocol,
    the ones per sub-word, per original word and per lm-eval word, and bits per byte. A last-word
    test has four, in the order of LAST_WORD: accuracy in percent, correct answers as "5 of 8", the
    mean log-likelihood of a target in nats, and perplexity. A standard error, where it is known,
    follows after "±"; a perplexity from 10,000 on is "over 10,000", and an unknown number an em
    dash."""
    first = with_error(result.perplexity, result.spread)
    error = result.log_perplexity_error
    if isinstance(result, PerplexityResult):
        words = (
            result.subword_perplexity,
            result.original_token_perplexity,
            result.lm_eval_word_perplexity,
        )
        return (
            first,
            *(with_error(perplexity, None) for perplexity in words),
            with_error(result.bits_per_byte, result.bits_per_byte_error),
        )
    assert isinstance(result, ClozeResult)
    accuracy = f"{100 * result.accuracy:.2f} ± {100 * result.standard_error:.2f} %"
    correct = f"{show(result.num_correct)} of {show(result.num_examples)}"
    return accuracy, correct, with_error(-log(result.perplexity), error), first


def by_protocol(
    evaluations: Mapping[str, Result], order: Sequence[str]
) -> list[tuple[str, Result]]:
    """Return a list of pairs (model, result), sorted: perplexities of texts before last-word tests,
    then by protocol and by the model's position in `order`. Models that `order` lacks come last, by
    name.

    `evaluations` has results by file stem, MODEL-TASK, from which `-TASK` is taken off.
    """
    named = [(stem.removesuffix(f"-{result.task}"), result) for stem, result in evaluations.items()]
    models = [*order, *sorted(model for model, _ in named)]
    return sorted(
        named, key=lambda of: (isinstance(of[1], ClozeResult), of[1].task, models.index(of[0]))
    )


def evaluations_tables(
    evaluations: Mapping[str, Result], order: Sequence[str], labels: Mapping[str, str]
) -> list[Table]:
    """Return a list of at most two Tables of the page: one of perplexities by convention and one of
    last-word tests, each with a row for each result of its kind and left out if there is none.

    Rows are sorted by protocol, then by the model's position in `order`; other models come last. A
    model stands under its label in `labels`, or else its own name. `evaluations` has the results by
    file stem, which is the model's name and the task.
    """
    tables = []
    for title, heads, is_cloze in (
        ("Perplexity", CONVENTIONS, False),
        ("Last word", LAST_WORD, True),
    ):
        rows = [
            (
                labels.get(model, model),
                result.task,
                f"{result.kind}{', partial' if result.partial else ''}",
                *cells_of(result),
                result.checkpoint_digest[:16],
            )
            for model, result in by_protocol(evaluations, order)
            if isinstance(result, ClozeResult) == is_cloze
        ]
        if rows:
            tables.append(
                Table(("model", "protocol", "kind", *heads, "checkpoint"), rows, 3, title)
            )
    return tables


def evaluations_data(evaluations: Mapping[str, Result]) -> Table:
    """Return a Table with a row for each of `evaluations`, a dict name → Result, in its order. The
    column `evaluation` has the name; the next columns have the fields in COLUMNS, under the fields'
    names, with numbers as recorded. A cell is empty where the result lacks the field, or the field
    is None. The first three columns, `evaluation`, `task` and `kind`, count as words, the others as
    numbers."""
    rows = []
    for stem, evaluation in evaluations.items():
        values = [getattr(evaluation, field, None) for field in COLUMNS]
        rows.append([stem, *map(_plain, values)])
    return Table(["evaluation", *COLUMNS], rows, 3)
