"""The catalogue of published claims: each to the digit of its reference file, at most one experiment for each."""

import csv
import math
import re
from collections import Counter
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from mlm_repro.experiments.catalogue import (
    CLAIMS,
    HERE,
    erratum_of,
    every_claim,
    find_experiment,
    load_claims,
    load_experiments,
)
from mlm_repro.experiments.published import position, published_rows, published_value, workload_rows
from mlm_repro.experiments.quantities import FORMULAS
from mlm_repro.lineage.errors import BadInput

FOLDERS = sorted(path.parent for path in HERE.glob("*/*/experiment.toml"))
EXHIBITS = [
    f"2019/{one}" for one in ("table-1", "table-2", "table-3", "table-7", "table-8", "figure-1", "figure-5", "figure-6")
]
EXHIBITS += [f"2021/{one}" for one in ("table-1", "table-2", *(f"figure-{n}" for n in (6, 7, 8, *range(11, 19))))]


CLAIMED: dict[str, dict[str, str]] = {  # file of reference values: column of results to the claim's id, from the row
    "A_megatron2019_table1_scaling_configs.csv": {
        "params_B": "2019/table-1/{params_B}b/parameters",
        "fig5_mp_pct": "2019/figure-5/model-parallel/{mp_gpus}",
        "fig5_mpdp_pct": "2019/figure-5/model-and-data-parallel/{mp_dp_gpus}",
        "fig1_mp_TFs_per_gpu_digitized": "2019/figure-1/model-parallel/{mp_gpus}",
        "fig1_mpdp_TFs_per_gpu_digitized": "2019/figure-1/model-and-data-parallel/{mp_dp_gpus}",
    },
    "A_megatron2019_table2_gpt2.csv": {
        "days_per_epoch": "2019/table-2/{params}/days-per-epoch",
        "wikitext103_ppl_paper": "2019/table-3/{params}/wikitext103",
        "lambada_acc_paper": "2019/table-3/{params}/lambada",
        "wikitext103_ppl_blog_sep2019": "2019/blog-september/{params}/wikitext103",
        "lambada_acc_blog_sep2019": "2019/blog-september/{params}/lambada",
    },
    "A_megatron2019_table4_bert.csv": {"val_ppl": "2019/table-4/{params}"},
    "A_megatron2019_table5_bert_tasks.csv": {
        "trained_tokens_ratio": "2019/table-5/{model}/token-ratio",
        **{name: f"2019/table-5/{{model}}/{name.replace('_', '-')}" for name in (
            "mnli_m", "mnli_mm", "qqp", "squad11_f1", "squad11_em", "squad2_f1", "squad2_em",
            "race_test", "race_m", "race_h",
        )},
    },
    "A_megatron2019_table7_heads.csv": {"scaling_pct": "2019/table-7/{heads}"},
    "A_megatron2019_table8_strong.csv": {"speedup": "2019/table-8/{gpus}"},
    "B_ptdp_table1.csv": {
        "params_B": "2021/table-1/{params_B}b/parameters", "TFs_gpu": "2021/table-1/{params_B}b/tflops",
        "pct_peak": "2021/table-1/{params_B}b/share", "agg_PFs": "2021/table-1/{params_B}b/total",
    },
    "B_ptdp_table2_zero3.csv": {
        "TFs_gpu": "2021/table-2/{scheme}/{params_B}b/{gpus}/tflops",
        "days_300B": "2021/table-2/{scheme}/{params_B}b/{gpus}/days",
    },
    "D_gpt2_table3.csv": {name: f"gpt-2/table-3/{{model}}/{name.replace('_', '-')}" for name in (
        "lambada_ppl", "lambada_acc", "cbt_cn", "cbt_ne", "wikitext2_ppl", "ptb_ppl", "enwik8_bpb", "text8_bpc",
        "wikitext103_ppl", "1bw_ppl",
    )},
    "fig6_valppl_digitized.csv": {name: f"2019/figure-6/{name}/{{x}}" for name in ("355M", "2.5B", "8.3B")},
    "ptdp_figures.csv": {"value": "2021/figure-{figure}/{series}/{x}"},
}  # fmt: skip
DRAWN_AS = {
    "175b": "174.6b", "530b": "529.6b", " seq/s": "", "tf/s/gpu": "1-gpu", "/": "-", "ized": "ised",
    "560(plotted; table 2 says 640*)": "640",
}  # fmt: skip
"""How the file of the 2021 paper's figures calls what claims call otherwise."""


def reference_row(row: dict[str, str]) -> dict[str, str]:
    """The row's cells as ids spell them: of a pair of sizes the first, and a figure's series without its axis."""
    cells = {name: cell.lower() for name, cell in row.items()}
    if "series" in cells:
        for drawn, claimed in DRAWN_AS.items():
            cells |= {name: cells[name].replace(drawn, claimed) for name in ("series", "x")}
        cells |= {"series": cells["series"].partition(" (")[0].replace(" ", "-")}
        cells |= {"x": cells["x"].strip("()").partition(",")[0]}
    return cells


@pytest.mark.parametrize("name", CLAIMED)
def test_every_number_of_the_reference_files_is_its_claim_and_no_other_is(name: str, reference: Path) -> None:
    expected: dict[str, Decimal] = {}
    with (reference / name).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            cells = reference_row(row)
            for column, form in CLAIMED[name].items():
                if row[column]:
                    assert expected.setdefault(form.format(**cells).lower(), Decimal(row[column])) == Decimal(
                        row[column]
                    )
    folders = {re.sub(r"/[^/]*$", "/", claim) for claim in expected}
    kept = {claim.id: claim for claim in every_claim() if re.sub(r"/[^/]*$", "/", claim.id) in folders}
    assert {name: claim.value for name, claim in kept.items() if name in expected} == expected
    assert [name for name, claim in kept.items() if name not in expected and claim.confidence != "derived"] == []


def test_the_curves_of_august_2019_are_claims_to_the_digit(reference: Path) -> None:
    claims = Counter((claim.series, claim.x, claim.value) for claim in every_claim()
                     if claim.quantity == "webtext_validation_perplexity")  # fmt: skip
    expected: Counter[tuple[str, float, Decimal]] = Counter()
    for path in reference.glob("aug2019_*.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                expected.update(
                    (key.lower(), float(row["x"]), Decimal(row[key])) for key in row if key != "x" and row[key]
                )
    assert claims == expected


def test_every_table_and_figure_of_the_papers_is_an_experiment() -> None:
    assert set(EXHIBITS) <= load_experiments().keys()


@pytest.mark.parametrize("folder", FOLDERS, ids=[path.name for path in FOLDERS])
def test_a_folder_has_its_three_files_and_every_pattern_finds_a_claim(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"README.md", "expected.toml", "experiment.toml"}
    (experiment,) = (
        one for one in load_experiments().values() if f"name = {one.name!r}".replace("'", '"')
        in (folder / "experiment.toml").read_text(encoding="utf-8")
    )  # fmt: skip
    for pattern in experiment.expected.claims:
        assert any(fnmatchcase(claim.id, pattern) for claim in experiment.claims), pattern
    assert experiment.produces(experiment.claims[0].quantity) or experiment.parts or experiment.not_run


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
                    if claim.quantity in part.computed and (claim.series, claim.x) == (
                        row["series"],
                        position(part, row)["x"],
                    ):
                        ours = FORMULAS[claim.quantity](row, first)
                        assert claim.agrees(ours) or erratum_of(claim), claim.id
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


@pytest.mark.parametrize(
    ("value", "relation", "tolerance", "low", "high"),
    [
        ("10.8", "=", "digits", 10.75, 10.85),
        ("200", "=", "5%", 190, 210),
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
    ends = (high if Decimal(value) > 0 else low,) if tolerance == "digits" else ()
    for end in filter(math.isfinite, (low, high)):
        assert claim.agrees(end) == (end not in ends), "a half is rounded away from zero"


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
        ("protocol", ""),
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
