"""The published records of a reproduction are the claims, and the claims those of the reference files, to the digit."""

from decimal import Decimal
from pathlib import Path

from experiments.catalogue import find_experiment, read_rows
from experiments.published import published_records
from experiments.reproduce.plan import LADDER


def values(experiment: str) -> dict[tuple[object, ...], Decimal]:
    """The published records of an experiment."""
    records = [one for one in published_records(LADDER) if one.experiment == experiment]
    found = {(one.series, one.quantity, one.source, one.x): Decimal(str(one.value)) for one in records}
    assert len(found) == len(records)
    return found


def test_figure_6_is_the_reference_file(reference: Path) -> None:
    assert values("2019/figure-6") == {
        (model, "validation_perplexity", "arXiv:1909.08053 Figure 6", float(row["x"])): Decimal(row[model.upper()])
        for row in read_rows(reference / "fig6_valppl_digitized.csv")
        for model in LADDER
        if row[model.upper()]
    }


def test_table_3_is_the_reference_file(reference: Path) -> None:
    assert values("2019/table-3") == {
        (row["params"].lower(), quantity, source, None): Decimal(row[f"{column}_{suffix}"])
        for row in read_rows(reference / "A_megatron2019_table2_gpt2.csv")
        for quantity, column in (("wikitext103_perplexity", "wikitext103_ppl"), ("lambada_accuracy", "lambada_acc"))
        for source, suffix in (
            ("arXiv:1909.08053 Table 3", "paper"),
            ("ADLR blog 2019-09-05 results table", "blog_sep2019"),
        )
    }


def test_the_models_are_those_of_the_reference_file(reference: Path) -> None:
    from engine.config import RunConfig
    from lineage.config import load_config
    from lineage.shipped import model_file

    for row in read_rows(reference / "A_megatron2019_table2_gpt2.csv"):
        model = load_config(model_file(row["params"].lower()), RunConfig).model
        assert (model.num_layers, model.hidden_size, model.num_heads, model.head_dim) == tuple(
            int(row[key]) for key in ("layers", "hidden", "heads", "hidden_per_head")
        )


def test_every_claim_becomes_one_record_with_its_own_uncertainty() -> None:
    records = list(published_records(LADDER))
    claims = [claim for name in ("2019/figure-6", "2019/table-3") for claim in find_experiment(name).claims]
    assert [(one.series, one.quantity, one.x, one.value, one.unit, one.note) for one in records] == [
        (one.series, one.quantity, one.x, float(one.value), one.unit, one.notes) for one in claims
    ]
    assert len(records) == 89 + 12
    assert {record.kind for record in records} == {"published"}

    def notes(x: float) -> dict[str, str]:
        return {one.series: one.note for one in records if one.x == x}

    assert notes(10_000) == {"2.5b": "digitised, ±0.1", "8.3b": "digitised, ±0.1"}
    assert notes(20_000) == dict.fromkeys(LADDER, "digitised, ±0.03")
    assert notes(300_000)["8.3b"] == "printed in the text"


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
