"""The published records of a reproduction are the claims; its models are those of the reference
file."""

from pathlib import Path

from mlm_repro.engine.config import RunConfig
from mlm_repro.experiments.catalogue import find_experiment, read_rows
from mlm_repro.experiments.published import published_records
from mlm_repro.experiments.reproduce.files import LADDER
from mlm_repro.lineage.config import load_config
from mlm_repro.lineage.shipped import model_file


def test_the_models_are_those_of_the_reference_file(reference: Path) -> None:
    for row in read_rows(reference / "A_megatron2019_table2_gpt2.csv"):
        model = load_config(model_file(row["params"].lower()), RunConfig).model
        assert (model.num_layers, model.hidden_size, model.num_heads, model.head_dim) == tuple(
            int(row[key]) for key in ("layers", "hidden", "heads", "hidden_per_head")
        )


def test_every_claim_becomes_one_record_with_its_own_uncertainty() -> None:
    records = list(published_records(LADDER))
    claims = [
        claim
        for name in ("2019/figure-6", "2019/table-3")
        for claim in find_experiment(name).claims
    ]
    assert [
        (one.series, one.quantity, one.x, one.value, one.unit, one.note) for one in records
    ] == [
        (one.series, one.quantity, one.x, float(one.value), one.unit, one.notes) for one in claims
    ]
    assert len(records) == 89 + 12
    assert {record.kind for record in records} == {"published"}

    def notes(x: float) -> dict[str, str]:
        return {one.series: one.note for one in records if one.x == x}

    assert notes(10_000) == {"2.5b": "digitised, ±0.1", "8.3b": "digitised, ±0.1"}
    assert notes(20_000) == dict.fromkeys(LADDER, "digitised, ±0.03")
    assert notes(300_000)["8.3b"] == "printed in the text"
    assert {record.series for record in published_records(("2.5b",))} == {"2.5b"}
