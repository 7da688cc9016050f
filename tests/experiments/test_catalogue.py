"""The catalogue of published claims: to the digit of the reference files, each answered by at most one experiment."""

import csv
import math
import re
from collections import Counter
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from experiments.catalogue import CLAIMS, HERE, every_claim, find_experiment, load_claims, load_experiments
from experiments.published import published_rows, published_value, workload_rows, x_of
from experiments.quantities import FORMULAS
from lineage.errors import BadInput

FOLDERS = sorted(path.parent for path in HERE.glob("*/*/experiment.toml"))
ISSUE = [
    f"2019/{one}" for one in ("table-1", "table-2", "table-3", "table-7", "table-8", "figure-1", "figure-5", "figure-6")
]
ISSUE += [f"2021/{one}" for one in ("table-1", "table-2", *(f"figure-{n}" for n in (6, 7, 8, *range(11, 19))))]


NOT_RESULTS = {
    "hidden", "heads", "layers", "mp_gpus", "mp_dp_gpus", "gpus", "hidden_per_head", "batch", "mbs_script", "tp", "pp",
    "layers_per_vstage_script", "v_chunks", "mp", "microbatch", "x", "figure",
}  # fmt: skip
CLAIMED = {  # file of reference values, start of the claims' ids
    "A_megatron2019_table1_scaling_configs.csv": ("2019/table-1/", "2019/figure-1/", "2019/figure-5/"),
    "A_megatron2019_table2_gpt2.csv": ("2019/table-2/*/days", "2019/table-3/[238]", "2019/blog-september/[238]"),
    "A_megatron2019_table4_bert.csv": ("2019/table-4/",),
    "A_megatron2019_table5_bert_tasks.csv": ("2019/table-5/",),
    "A_megatron2019_table7_heads.csv": ("2019/table-7/",),
    "A_megatron2019_table8_strong.csv": ("2019/table-8/",),
    "B_ptdp_table1.csv": ("2021/table-1/*/parameters", "2021/table-1/*/tflops", "2021/table-1/*/share",
                          "2021/table-1/*/total"),
    "B_ptdp_table2_zero3.csv": ("2021/table-2/",),
    "D_gpt2_table3.csv": ("gpt-2/table-3/",),
    "fig6_valppl_digitized.csv": ("2019/figure-6/",),
    "ptdp_figures.csv": ("2021/figure-",),
}  # fmt: skip


def numbers(path: Path) -> Counter[Decimal]:
    """Every result in a reference file, with how often it is there."""
    named = {"params_B"} if path.name == "B_ptdp_table2_zero3.csv" else set()
    found: Counter[Decimal] = Counter()
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            for column, cell in row.items():
                if column in NOT_RESULTS | named or not cell:
                    continue
                try:
                    found[Decimal(cell)] += 1
                except ArithmeticError:
                    continue
    return found


@pytest.mark.parametrize("name", CLAIMED)
def test_every_number_of_the_reference_files_is_a_claim_and_no_other(name: str, reference: Path) -> None:
    claims = [one for one in every_claim() if any(fnmatchcase(one.id, start + "*") for start in CLAIMED[name])]
    assert Counter(one.value for one in claims) == numbers(reference / name)


def test_the_curves_of_august_2019_are_claims_to_the_digit(reference: Path) -> None:
    claims = Counter(
        (claim.series, claim.x, claim.value)
        for claim in every_claim()
        if claim.quantity == "webtext_validation_perplexity"
    )
    expected: Counter[tuple[str, float, Decimal]] = Counter()
    for path in reference.glob("aug2019_*.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                expected.update(
                    (key.lower(), float(row["x"]), Decimal(row[key])) for key in row if key != "x" and row[key]
                )
    assert claims == expected


def test_conflicting_sources_are_both_kept() -> None:
    values = {claim.id: str(claim.value) for claim in every_claim()}
    assert values["2019/table-3/2.5b/wikitext103"] == "12.76"
    assert values["2019/blog-september/2.5b/wikitext103"] == "12.68"
    at_512 = [claim for claim in find_experiment("2019/figure-5").claims if claim.x == 512]
    assert {str(claim.value) for claim in at_512} == {"60", "74", "76"}
    assert values["2019/figure-5/model-parallel/8"] == "77"


def test_the_experiments_are_those_of_the_papers() -> None:
    neighbours = {
        f"transformer-xl/{one}"
        for one in (
            "memory",
            "large-batch",
            "tokens",
            "batch-scaling",
            "learning-rate-finder",
            "gemm",
            "mixed-precision",
        )
    }
    neighbours |= {"gpipe/bubble", "huggingface/tensor-parallel", "zero/communication", "zero/memory"}
    released = {"gpt2/released", "megatron/released-345m"}
    measured = {"2019/words", "2021/communication", "2021/schedules", "2021/sizes", "2022/activations"}
    measured |= {"2019/figure-7", "2019/bert", "2019/scaling-law"}
    assert set(load_experiments()) == {*ISSUE, *neighbours, *measured, *released}


@pytest.mark.parametrize("folder", FOLDERS, ids=[path.name for path in FOLDERS])
def test_a_folder_has_its_three_files_and_every_pattern_finds_a_claim(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"README.md", "expected.toml", "experiment.toml"}
    (experiment,) = (
        one for one in load_experiments().values() if f"name = {one.name!r}".replace("'", '"')
        in (folder / "experiment.toml").read_text(encoding="utf-8")
    )  # fmt: skip
    for pattern in experiment.expected.claims:
        assert any(fnmatchcase(claim.id, pattern) for claim in experiment.claims), pattern
    assert experiment.produces(experiment.claims[0].quantity) or experiment.parts


def test_no_claim_is_answered_twice() -> None:
    answered = Counter(claim.id for one in load_experiments().values() for claim in one.claims)
    assert [name for name, count in answered.items() if count > 1] == []


def test_every_closed_form_gives_what_is_published() -> None:
    compared = Counter[str]()
    for experiment in load_experiments().values():
        for part in experiment.parts:
            rows = published_rows(experiment, part)
            for row in rows:
                first = next(one for one in rows if one["series"] == row["series"])
                for claim in experiment.claims:
                    if claim.quantity in part.computed and (claim.series, claim.x) == (row["series"], x_of(part, row)):
                        ours = FORMULAS[claim.quantity](row, first)
                        assert claim.agrees(ours), claim.id
                        compared[claim.quantity] += 1
    assert set(compared) == set(FORMULAS)
    assert compared["percent_of_peak"] == compared["aggregate_petaflops"] == 10
    assert (compared["training_days"], compared["training_days_equation_4"]) == (12, 2)


def test_a_workload_without_its_claim_is_named() -> None:
    experiment = find_experiment("2021/table-1")
    row, *_ = workload_rows("ptd-p/table-1")
    with pytest.raises(BadInput, match=r"no claim has tflops_per_gpu for the workload 1.7B of ptd-p/table-1"):
        FORMULAS["percent_of_peak"](row, row)
    assert published_value(published_rows(experiment, experiment.parts[0])[0], "tflops_per_gpu") == 137


def test_equation_4_is_beyond_the_days_of_table_2() -> None:
    """The table has Equation 3; its tolerance, the rounding of what it prints, tells the two apart in most rows."""
    experiment = find_experiment("2021/table-2")
    beyond = 0
    for part in experiment.parts[:2]:
        for row in published_rows(experiment, part):
            (claim,) = (one for one in experiment.claims if one.quantity == "training_days"
                        and (one.series, one.x) == (row["series"], x_of(part, row)))  # fmt: skip
            assert claim.agrees(FORMULAS["training_days"](row, row))
            beyond += not claim.agrees(FORMULAS["training_days_equation_4"](row | {"tokens": "300e9"}, row))
    assert beyond >= 10


@pytest.mark.parametrize(
    ("value", "relation", "tolerance", "low", "high"),
    [
        ("10.8", "=", "digits", 10.75, 10.85),
        ("84", "=", "digits", 83.5, 84.5),
        ("200", "=", "5%", 190, 210),
        ("-3", "=", "5%", -3.15, -2.85),
        ("76", "=", "±3", 73, 79),
        ("10", "=", "-2+0.5", 8, 10.5),
        ("10", "=", "-20%+0%", 8, 10),
        ("4", "=", "exact", 4, 4),
        ("10.8", "<=", "digits", -math.inf, 10.85),
        ("10", ">=", "exact", 10, math.inf),
        ("0.02", "ratio", "100%", 0.01, 0.04),
        ("2", "order", "exact", 2, 2),
        ("1", "sign", "exact", 5e-324, math.inf),
        ("-1", "sign", "exact", -math.inf, -5e-324),
    ],
)
def test_a_tolerance_is_what_it_says(value: str, relation: str, tolerance: str, low: float, high: float) -> None:
    update = {"value": Decimal(value), "relation": relation, "tolerance": tolerance}
    claim = every_claim()[0].model_copy(update=update)
    assert claim.bounds == pytest.approx((low, high))
    beside = [end + way * max(abs(end), 1) / 1000 for end, way in ((low, -1), (high, 1)) if math.isfinite(end)]
    assert not any(claim.agrees(number) for number in beside)
    assert all(claim.agrees(end) for end in (low, high) if math.isfinite(end))


def test_every_claim_says_what_it_asks_and_of_what() -> None:
    """Printed digits are rounding; what was digitised allows for it; a one-sided source is held to one side."""
    for claim in every_claim():
        low, high = claim.bounds
        assert low <= float(claim.value) <= high, claim.id
        assert claim.protocol, claim.id
        assert claim.because, claim.id
        is_most = re.match(r"(up to|as much as|under [\d.]+ %)(;|$)", claim.notes) or "at most" in claim.protocol
        assert not is_most or claim.relation == "<=", claim.id
        assert (claim.tolerance == "exact") or (claim.relation not in ("order", "sign")), claim.id
        if claim.confidence == "dig":
            assert "digitisation" in claim.because or "seeds" in claim.because, claim.id


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("tolerance", "about"),
        ("relation", "about"),
        ("because", ""),
        ("protocol", ""),
        ("confidence", "memory"),
        ("value", "many"),
        ("x", "far"),
        ("id", "2019/table-1/1.2b/parameters"),
    ],
)
def test_a_claim_that_is_none_is_refused(column: str, cell: str, tmp_path: Path) -> None:
    with (CLAIMS / "megatron-lm-2019.csv").open(encoding="utf-8", newline="") as file:
        first, second = (row for _, row in zip(range(2), csv.DictReader(file), strict=False))
    with (tmp_path / "claims.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(first))
        writer.writeheader()
        writer.writerows((first, second | {column: cell}))
    with pytest.raises(BadInput, match=r"claims\.csv line 3"):
        load_claims(tmp_path)
