"""Several seeds on the page: bands in Figure 6, means, and whether the order holds in each."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mlm_repro.evaluation.schema import ClozeResult, PerplexityResult, Result
from mlm_repro.experiments.files import Comparison, ReproductionScores
from mlm_repro.experiments.scores import order_verdict
from mlm_repro.lineage.digest import seal
from mlm_repro.lineage.files import write_document
from mlm_repro.lineage.numbers import show
from mlm_repro.lineage.records import Record
from mlm_repro.reports.figures import Layer, draw, layers_of
from mlm_repro.reports.load import Reproduction, load_reproduction
from mlm_repro.reports.reproduced import by_kind, reproduction_exhibits, twins_table
from mlm_repro.reports.tables import cells_of, chance, comparison_tables
from tests.architecture.rooms import ROOT
from tests.reports.reproduction import evaluation, page_text, write_reproduction

NAMES = ("355m", "2.5b", "8.3b")
BITS = {1234: (3.2, 3.1, 3.0), 1235: (3.3, 3.1, 3.15)}


def scores() -> ReproductionScores:
    differences = ((0, 1, -0.15, -0.2, -0.1), (1, 2, -0.025, -0.1, 0.05))
    comparisons = [
        Comparison(text="wikitext103", smaller=a, larger=b, difference=d, low=low, high=high)
        for a, b, d, low, high in differences
    ]
    return ReproductionScores(
        text="wikitext103", articles=60, seeds=2, models=[*NAMES], comparisons=comparisons
    )


@pytest.fixture
def reproduction(tmp_path: Path) -> Reproduction:
    """One whose second seed ends elsewhere, the largest model above the middle one."""
    found = load_reproduction(write_reproduction(tmp_path))
    shift = {"355m": 4.0, "2.5b": 2.0, "8.3b": 90.0}
    again = [
        record.model_copy(update={"seed": 1235, "value": record.value + shift[record.series]})
        for record in found.select("2019/figure-6")
        if record.kind == "scaled"
    ]
    bits = [
        Record(
            experiment="2019/table-3",
            series=name,
            quantity="wikitext103_bits_per_byte",
            value=value,
            kind="scaled",
            source="a-run",
            digest="0" * 64,
            seed=seed,
        )
        for seed, values in BITS.items()
        for name, value in zip(NAMES, values, strict=True)
    ]
    return replace(found, scores=scores(), records=(*found.records, *again, *bits))


def figure_6_curves(reproduction: Reproduction) -> list[Layer]:
    return layers_of(
        reproduction.select("2019/figure-6", "validation_perplexity"), reproduction.order
    )


def test_curves_of_several_seeds_are_their_means_with_a_band(reproduction: Reproduction) -> None:
    curves = {(curve.kind, curve.series): curve for curve in figure_6_curves(reproduction)}
    assert curves["published", "8.3b"].repeats == 1
    points = curves["scaled", "355m"].points
    assert [point.high - point.low for point in points] == pytest.approx([4.0] * len(points))
    assert [point.value for point in points] == pytest.approx(
        [(point.low + point.high) / 2 for point in points]
    )


def test_figure_6_draws_the_band_of_each_twin(reproduction: Reproduction) -> None:
    ours, published = draw(by_kind(figure_6_curves(reproduction))).axes
    assert tuple(axes.get_title("left") or axes.get_title() for axes in (published, ours)) == (
        "published",
        "scaled twins",
    )
    assert [
        sum(line.get_linestyle() != "None" for line in axes.lines) for axes in (published, ours)
    ] == [3, 3]
    assert (len(published.collections), len(ours.collections)) == (0, 3)
    one = [record for record in reproduction.select("2019/figure-6") if record.seed != 1235]
    assert not draw(by_kind(layers_of(one, NAMES))).axes[0].collections


def test_a_seed_in_which_the_order_fails_is_named(reproduction: Reproduction) -> None:
    said = order_verdict(reproduction.records, reproduction.scores, {})
    assert said.startswith("The paper's order does not hold beyond chance in each of 2 seeds: ")
    caption = reproduction_exhibits(reproduction)["2019-twins"].caption
    assert caption == [
        "On wikitext103 2.5b twin (1.78 M) takes 0.150 bits per byte fewer than 355m twin (504 k) "
        "(90 %: 0.100 to 0.200).",
        "On wikitext103 8.3b twin (4.17 M) takes 0.025 bits per byte fewer than 2.5b twin (1.78 M) "
        "(90 %: -0.050 to 0.100); "
        "the interval has zero in it.",
        "Intervals are over 60 articles and 2 seeds.",
    ]


def test_the_table_has_means_with_the_least_and_the_greatest(reproduction: Reproduction) -> None:
    (table,) = reproduction_exhibits(reproduction)["2019-twins"].tables
    place = list(table.heads).index("wikitext103 bits per byte")
    rows = {row[0]: row[place] for row in table.rows}
    assert rows["8.3b twin (4.17 M)"] == "3.075 (3.000 to 3.150 in 2 seeds)"
    assert not any("perplexity" in head for head in table.heads)


def test_a_guess_stands_beside_what_the_twins_scored() -> None:
    """An even guess has the entropy of the vocabulary a sub-word; a word has at least one."""
    kept = load_reproduction(ROOT / "results" / "reproduce-8.3b")
    table = twins_table(kept)
    guess = dict(zip(table.heads, table.rows[-1], strict=True))
    text, words = (kept.evaluations[f"8.3b-{task}"] for task in ("wikitext103", "lambada"))
    assert isinstance(text, PerplexityResult)
    assert isinstance(words, ClozeResult)
    entropy = math.log2(kept.summary.models[0].trained.vocab_size or 0)
    sub_words = text.bits_per_byte / (text.loss_per_token / math.log(2))  # in a byte
    assert float(guess["heldout bits per byte"]) == pytest.approx(entropy * sub_words, abs=1e-3)
    assert guess["heldout cloze accuracy %"] == f"at most {100 * 2**-entropy:.2g}"
    nats = float(guess["heldout cloze log likelihood nats"])
    assert nats == pytest.approx(
        -entropy * math.log(2) * words.num_scored_tokens / words.num_examples, abs=1e-3
    )
    assert all(
        words.accuracy > 20 * 2**-entropy
        for words in kept.evaluations.values()
        if isinstance(words, ClozeResult)
    )


def test_seeds_share_a_cell_of_table_3(reproduction: Reproduction) -> None:
    twin = next(
        one
        for one in reproduction.select("2019/table-3", "wikitext103_perplexity")
        if one.kind == "scaled"
    )
    assert comparison_tables([twin]) == []  # a perplexity of words of so small a model says nothing
    first = twin.model_copy(update={"kind": "measured"})
    again = first.model_copy(update={"value": first.value + 100, "seed": 1235})
    table, *_ = comparison_tables([first, again])
    low, mean, high = (show(first.value + more) for more in (0, 50, 100))
    assert table.rows[0][-1] == f"{mean} ({low} to {high} in 2 seeds), partial"


def test_tokens_of_a_parameter_stand_beside_the_published_ones(reproduction: Reproduction) -> None:
    shapes, _ = reproduction_exhibits(reproduction)["models"].tables
    place = list(shapes.heads).index("tokens/parameter")
    model = reproduction.summary.models[0]
    assert model.published.parameters
    assert model.trained.parameters
    assert shapes.rows[0][place] == f"{300_000 * 512 * 1024 / model.published.parameters:.4g}"
    assert shapes.rows[1][place] == f"{500 * 8 * 128 / model.trained.parameters:.4g}"


def test_a_standard_error_says_how_many_digits_a_number_has() -> None:
    cells = cells_of(
        Result.model_validate(evaluation(perplexity=82100.88, log_perplexity_standard_error=0.08))
    )
    assert (cells[0], cells[-1]) == ("over 10,000", "1.520 ± 0.011")
    cells = cells_of(
        Result.model_validate(evaluation(perplexity=8210.88, log_perplexity_standard_error=0.08))
    )
    assert cells[0] == "8,210 ± 660"
    words = {"accuracy": 0.01, "perplexity": 1.8e8, "perplexity_standard_error": 1.5e7}
    cells = cells_of(Result.model_validate(evaluation("lambada", **words)))
    assert cells[2:] == ("-19.008 ± 0.083", "over 10,000")


def test_paired_differences_stand_on_the_page(tmp_path: Path) -> None:
    run = write_reproduction(tmp_path, sealed=False)
    write_document(run / "scores.json", scores())
    seal(run)
    assert (
        "8.3b twin (4.17 M) takes 0.025 bits per byte fewer than 2.5b twin (1.78 M)"
        in page_text(run)
    )


def test_a_text_without_a_passage_has_no_chance_level() -> None:
    empty = ClozeResult.model_construct(task="lambada", num_examples=0, num_scored_tokens=0)
    assert chance(empty, 300) == {}
    four = ClozeResult.model_construct(task="lambada", num_examples=4, num_scored_tokens=6)
    assert chance(four, 300) == {
        "lambada_accuracy": "at most 0.33",
        "lambada_log_likelihood": "-8.556",
    }
