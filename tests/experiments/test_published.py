"""The published numbers are those of the reference files, to the digit."""

import csv
from decimal import Decimal
from pathlib import Path

from experiments.plan import LADDER
from experiments.published import HERE, published_records


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_figure_6_is_the_reference_file(reference: Path) -> None:
    assert (HERE / "figure-6.csv").read_bytes() == (reference / "fig6_valppl_digitized.csv").read_bytes()


def test_table_3_is_the_reference_file(reference: Path) -> None:
    expected = {
        (row["params"].lower(), quantity, source, row[f"{column}_{suffix}"])
        for row in rows(reference / "A_megatron2019_table2_gpt2.csv")
        for quantity, column in (("wikitext103_perplexity", "wikitext103_ppl"), ("lambada_accuracy", "lambada_acc"))
        for source, suffix in (("arXiv:1909.08053 Table 3", "paper"), ("ADLR blog 2019-09-05", "blog_sep2019"))
    }
    found = [(row["model"], row["quantity"], row["source"], row["value"]) for row in rows(HERE / "table-3.csv")]
    assert set(found) == expected
    assert len(found) == len(expected) == 12


def test_the_models_are_those_of_the_reference_file(reference: Path) -> None:
    from engine.config import RunConfig
    from experiments.plan import model_file
    from lineage.config import load_config

    for row in rows(reference / "A_megatron2019_table2_gpt2.csv"):
        model = load_config(model_file(row["params"].lower()), RunConfig).model
        assert (model.num_layers, model.hidden_size, model.num_heads, model.head_dim) == tuple(
            int(row[key]) for key in ("layers", "hidden", "heads", "hidden_per_head")
        )


def test_every_published_cell_becomes_one_record() -> None:
    records = list(published_records(LADDER))
    figure = {(r.series, r.x): Decimal(str(r.value)) for r in records if r.experiment == "2019/figure-6"}
    table = {(r.series, r.quantity, r.source): Decimal(str(r.value)) for r in records if r.x is None}
    assert figure == {
        (model, float(row["x"])): Decimal(row[model.upper()])
        for row in rows(HERE / "figure-6.csv")
        for model in LADDER
        if row[model.upper()]
    }
    assert table == {
        (row["model"], row["quantity"], row["source"]): Decimal(row["value"]) for row in rows(HERE / "table-3.csv")
    }
    assert len(records) == len(figure) + len(table)
    assert {record.kind for record in records} == {"published"}
    assert all(record.source for record in records)


def test_only_the_models_asked_for_are_given() -> None:
    assert {record.series for record in published_records(("2.5b",))} == {"2.5b"}


def test_the_curves_fall_and_larger_models_lie_lower() -> None:
    curves = {
        model: {r.x: r.value for r in published_records((model,)) if r.quantity == "validation_perplexity"}
        for model in LADDER
    }
    for model in LADDER:
        values = [curves[model][x] for x in sorted(curves[model], key=lambda x: x or 0)]
        assert values == sorted(values, reverse=True)
    assert curves["8.3b"][300_000.0] == 9.27, "printed in the paper"
    for smaller, larger in (("355m", "2.5b"), ("2.5b", "8.3b")):
        assert all(curves[larger][x] < curves[smaller][x] for x in curves[smaller])
