"""The catalogue of published claims: each to the digit of its reference file, at most one
experiment for each."""

import csv
import math
import operator
import re
from collections import Counter
from decimal import ROUND_HALF_UP, Decimal
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_repro.experiments.catalogue import (
    CLAIMS,
    HERE,
    MEASUREMENTS,
    SAYS,
    Claim,
    Says,
    Tolerance,
    erratum_of,
    every_claim,
    every_tolerance,
    find_experiment,
    load_claims,
    load_experiments,
)
from mlm_repro.experiments.published import position, published_rows, published_value, workload_rows
from mlm_repro.experiments.quantities import FORMULAS
from mlm_repro.experiments.ranges import Range
from mlm_repro.experiments.verdicts import Results, judge, load_results
from mlm_repro.lineage.errors import BadInput
from tests.commands import ROOT
from tests.quotations import numbers

FOLDERS = sorted(path.parent for path in HERE.glob("*/*/experiment.toml"))
EXHIBITS = [
    f"2019/{one}"
    for one in (
        "table-1",
        "table-2",
        "table-3",
        "table-7",
        "table-8",
        "figure-1",
        "figure-5",
        "figure-6",
    )
]
EXHIBITS += [
    f"2021/{one}"
    for one in ("table-1", "table-2", *(f"figure-{n}" for n in (6, 7, 8, *range(11, 19))))
]


CLAIMED: dict[
    str, dict[str, str]
] = {  # file of reference values: column of results to the claim's id, from the row
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
        **{
            name: f"2019/table-5/{{model}}/{name.replace('_', '-')}"
            for name in (
                "mnli_m",
                "mnli_mm",
                "qqp",
                "squad11_f1",
                "squad11_em",
                "squad2_f1",
                "squad2_em",
                "race_test",
                "race_m",
                "race_h",
            )
        },
    },
    "A_megatron2019_table7_heads.csv": {"scaling_pct": "2019/table-7/{heads}"},
    "A_megatron2019_table8_strong.csv": {"speedup": "2019/table-8/{gpus}"},
    "B_ptdp_table1.csv": {
        "params_B": "2021/table-1/{params_B}b/parameters",
        "TFs_gpu": "2021/table-1/{params_B}b/tflops",
        "pct_peak": "2021/table-1/{params_B}b/share",
        "agg_PFs": "2021/table-1/{params_B}b/total",
    },
    "B_ptdp_table2_zero3.csv": {
        "TFs_gpu": "2021/table-2/{scheme}/{params_B}b/{gpus}/tflops",
        "days_300B": "2021/table-2/{scheme}/{params_B}b/{gpus}/days",
    },
    "D_gpt2_table3.csv": {
        name: f"gpt-2/table-3/{{model}}/{name.replace('_', '-')}"
        for name in (
            "lambada_ppl",
            "lambada_acc",
            "cbt_cn",
            "cbt_ne",
            "wikitext2_ppl",
            "ptb_ppl",
            "enwik8_bpb",
            "text8_bpc",
            "wikitext103_ppl",
            "1bw_ppl",
        )
    },
    "fig6_valppl_digitized.csv": {
        name: f"2019/figure-6/{name}/{{x}}" for name in ("355M", "2.5B", "8.3B")
    },
    "ptdp_figures.csv": {"value": "2021/figure-{figure}/{series}/{x}"},
}
DRAWN_AS = {
    "175b": "174.6b",
    "530b": "529.6b",
    " seq/s": "",
    "tf/s/gpu": "1-gpu",
    "/": "-",
    "ized": "ised",
    "560(plotted; table 2 says 640*)": "640",
}
"""How the file of the 2021 paper's figures calls what claims call otherwise."""


def reference_row(row: dict[str, str]) -> dict[str, str]:
    """The row's cells as ids spell them: of a pair of sizes the first, and a figure's series
    without its axis."""
    cells = {name: cell.lower() for name, cell in row.items()}
    if "series" in cells:
        for drawn, claimed in DRAWN_AS.items():
            cells |= {name: cells[name].replace(drawn, claimed) for name in ("series", "x")}
        cells |= {"series": cells["series"].partition(" (")[0].replace(" ", "-")}
        cells |= {"x": cells["x"].strip("()").partition(",")[0]}
    return cells


@pytest.mark.parametrize("name", CLAIMED)
def test_every_number_of_the_reference_files_is_its_claim_and_no_other_is(
    name: str, reference: Path
) -> None:
    expected: dict[str, Decimal] = {}
    with (reference / name).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            cells = reference_row(row)
            for column, form in CLAIMED[name].items():
                if row[column]:
                    assert expected.setdefault(
                        form.format(**cells).lower(), Decimal(row[column])
                    ) == Decimal(row[column])
    folders = {re.sub(r"/[^/]*$", "/", claim) for claim in expected}
    kept = {
        claim.id: claim for claim in every_claim() if re.sub(r"/[^/]*$", "/", claim.id) in folders
    }
    assert {name: claim.value for name, claim in kept.items() if name in expected} == expected
    assert [
        name
        for name, claim in kept.items()
        if name not in expected and claim.confidence != "derived"
    ] == []


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
                    (key.lower(), float(row["x"]), Decimal(row[key]))
                    for key in row
                    if key != "x" and row[key]
                )
    assert claims == expected


def test_every_table_and_figure_of_the_papers_is_an_experiment() -> None:
    assert set(EXHIBITS) <= load_experiments().keys()


@pytest.mark.parametrize("folder", FOLDERS, ids=[path.name for path in FOLDERS])
def test_a_folder_has_its_three_files_and_every_pattern_finds_a_claim(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "expected.toml",
        "experiment.toml",
    }
    (experiment,) = (
        one
        for one in load_experiments().values()
        if f"name = {one.name!r}".replace("'", '"')
        in (folder / "experiment.toml").read_text(encoding="utf-8")
    )
    for pattern in experiment.expected.claims:
        assert any(fnmatchcase(claim.id, pattern) for claim in experiment.claims), pattern
    assert (
        experiment.not_run or experiment.parts or experiment.produces(experiment.claims[0].quantity)
    )
    assert experiment.claims or experiment.ablation


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
                        assert claim.agrees(ours, measured=False) or erratum_of(claim), claim.id
                        compared[claim.quantity] += 1
    assert set(compared) == set(FORMULAS)
    assert compared["percent_of_peak"] == compared["aggregate_petaflops"] == 10
    assert (compared["training_days"], compared["training_days_equation_4"]) == (12, 2)


def test_a_workload_without_its_claim_is_named() -> None:
    experiment = find_experiment("2021/table-1")
    row, *_ = workload_rows("ptd-p/table-1")
    with pytest.raises(
        BadInput, match=r"no claim states tflops_per_gpu for the workload 1.7B of ptd-p/table-1"
    ):
        FORMULAS["percent_of_peak"](row, row)
    assert (
        published_value(published_rows(experiment, experiment.parts[0])[0], "tflops_per_gpu").value
        == 137
    )


@pytest.mark.parametrize(
    ("value", "says", "tolerance", "low", "high"),
    [
        ("10.8", "exact", "digits", 10.75, 10.85),
        ("200", "exact", "5%", 190, 210),
        ("76", "exact", "±3", 73, 79),
        ("76", "exact", "±0.1", 75.5, 76.5),
        ("10", "exact", "-2+0.5", 8, 10.5),
        ("10", "exact", "-20%+0%", 8, 10.5),
        ("0.02", "exact", "×2", 0.01, 0.04),
        ("4", "exact", "exact", 4, 4),
        ("40", "about", "digits", 36, 44),
        ("2", "about", "digits", 1.5, 2.5),
        ("10.8", "at most", "digits", -math.inf, 10.85),
        ("10", "at least", "exact", 10, math.inf),
        ("33", "there is", "digits", 32.5, math.inf),
        ("0", "at least", "digits", 5e-324, math.inf),
        ("0", "at most", "digits", -math.inf, -5e-324),
    ],
)
def test_a_claim_leaves_open_what_its_digits_its_class_and_its_tolerance_do(
    value: str, says: str, tolerance: str, low: float, high: float
) -> None:
    claim = changed(every_claim()[0], value=Decimal(value), says=says, tolerance=tolerance)
    assert claim.bounds() == pytest.approx((low, high))
    beside = [
        end + way * max(abs(end), 1) / 1000
        for end, way in ((low, -1), (high, 1))
        if math.isfinite(end)
    ]
    assert not any(claim.agrees(number) for number in beside)
    ends = (
        (high,)
        if says == "exact" and (low, high) == (claim.printed.low, claim.printed.high) != (4, 4)
        else ()
    )
    for end in filter(math.isfinite, (low, high)):
        assert claim.agrees(end) == (end not in ends), "a half is rounded away from zero"


def changed(claim: Claim, tolerance: str | None = None, **values: Any) -> Claim:
    """The claim with other values, and with a tolerance of its own."""
    claim = claim.model_copy(update=values)
    if tolerance:
        claim.__dict__["allowed"] = Tolerance(
            claims=(claim.id,), tolerance=tolerance, because="a test"
        )
    return claim


def test_a_tolerance_is_for_measurements_alone() -> None:
    claim = changed(every_claim()[0], value=Decimal("200"), says="exact", tolerance="5%")
    assert claim.agrees(209)
    assert not claim.agrees(209, measured=False)
    assert claim.agrees(Range(203, 200.1, 206), measured=False)


@given(
    st.decimals(-10_000, 10_000, places=2),
    st.integers(0, 2),
    st.floats(0, 2),
    st.sampled_from(["exact", "at most", "at least"]),
)
def test_no_number_that_rounds_to_the_printed_one_contradicts_it(
    number: Decimal, places: int, width: float, says: str
) -> None:
    """And a range is held against the end that suits the claim best."""
    printed = number.quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP)
    claim = changed(every_claim()[0], value=printed, says=says, tolerance="digits")
    if not claim.is_direction:
        assert claim.agrees(float(number))
        middle = float(number) + width
        assert claim.agrees(Range(middle, middle - width, middle + width))


@given(
    st.lists(
        st.tuples(st.decimals(1, 1000, places=1), st.floats(-0.05, 0.05)), min_size=4, max_size=4
    ),
    st.sampled_from(["+", "-", "*", "/"]),
    st.sampled_from(["+", "-", "*", "/"]),
)
def test_a_range_of_printed_numbers_holds_what_any_numbers_behind_them_give(
    printed: list[tuple[Decimal, float]], one: str, other: str
) -> None:
    of = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
    ranges = [Range.printed(number) for number, _ in printed]
    behind = [float(number) + error for number, error in printed]
    ours: Range = of[one](ranges[0], ranges[1]) + of[other](ranges[2], ranges[3])
    number = of[one](behind[0], behind[1]) + of[other](behind[2], behind[3])
    slack = 1e-9 * (abs(number) + 1e3)
    assert ours.low - slack <= number <= ours.high + slack
    assert ours.low - slack <= ours.value <= ours.high + slack


CELL = re.compile(
    r"(results |throughput )?[Tt]able.*|Figure \d+|validation curve|comment in the page"
)
"""Places whose numbers stand in cells or at points, so that no sentence says them."""


def test_no_two_claims_have_one_id() -> None:
    assert Counter(claim.id for claim in every_claim()).most_common(1)[0][1] == 1


def test_every_experiment_measures_what_there_is_and_every_ablation_is_whole() -> None:
    for experiment in load_experiments().values():
        assert experiment.measures in ("", *MEASUREMENTS)
        if (ablation := experiment.ablation) is None:
            continue
        for place, arm in enumerate(ablation.arms):
            assert ablation.finder or arm.rates or ablation.rates, f"{arm.name} has no rates to try"
            assert arm.rate_of in (
                "",
                *(earlier.name for earlier in ablation.arms[:place]),
            ), arm.name
        for effect in ablation.effects:
            assert {effect.of, effect.less} <= {arm.name for arm in ablation.arms}, effect.claim
            assert (effect.above, effect.below) != (None, None), effect.claim


def test_every_claim_has_a_quotation_with_its_digits_and_its_hedge_or_a_cell() -> None:
    """What was digitised allows for it, and the required relation follows from the words alone."""
    for claim in every_claim():
        low, high = claim.bounds()
        assert claim.is_direction or low <= float(claim.value) <= high, claim.id
        assert claim.sentence or CELL.fullmatch(claim.where), claim.id
        assert len(claim.sentence.split()) <= 25, claim.id
        assert re.search(SAYS[claim.says]["words"], claim.sentence), claim.id
        if claim.sentence and not claim.is_direction and claim.confidence != "derived":
            said = numbers(claim.sentence)
            assert {claim.value, claim.value * 1000} & {*said, clock(claim.sentence)}, claim.id
        if claim.confidence == "dig":
            assert claim.allowed.tolerance != "digits", claim.id


def clock(sentence: str) -> Decimal | None:
    """Hours of a sentence that says hours and minutes."""
    found = re.search(r"(\d+) hours (\d+) minutes", sentence)
    return Decimal(found[1]) + Decimal(found[2]) / 60 if found else None


STRONG = (
    r"up to|as much as|at most|no more than|at least|over|more"
    r" than|10\+|~|about|around|approximately|less than|under"
)


def test_a_sentence_that_hedges_its_number_has_no_class_that_overlooks_it() -> None:
    """An "up to 33 %" may not be held to 33 %."""
    for claim in every_claim():
        number = re.escape(f"{claim.value:,f}".rstrip("0").rstrip("."))
        if not claim.is_direction and re.search(
            rf"(^|\W)({STRONG}) ?{number}(?![\d.])", claim.sentence
        ):
            assert claim.says != "exact", f"{claim.id}: {claim.sentence}"


def test_every_tolerance_is_of_some_claim_and_has_a_reason() -> None:
    for tolerance in every_tolerance():
        for pattern in tolerance.claims:
            assert any(fnmatchcase(claim.id, pattern) for claim in every_claim()), pattern
        assert tolerance.because


FLIPS: list[tuple[str, str, str, Says, str]] = [
    ("2019/blog/webtext-multiple", "~4.5x", "at least 4.5x", "at least", "contradicted"),
    (
        "2021/text/interleaving-gain",
        "can improve throughput by 10+%",
        "improves throughput by at most 10%",
        "at most",
        "contradicted",
    ),
    ("2021/text/interleaving-most", "by as much as 10%", "by about 10%", "about", "contradicted"),
    (
        "2021/text/microbatch-gain",
        "can increase throughput by 15%",
        "increases throughput by 15%",
        "exact",
        "contradicted",
    ),
    (
        "2021/section-3.5/checkpoint-every",
        "every 1 or 2",
        "every at least 2",
        "at least",
        "contradicted",
    ),
    ("transformer-xl/post/wikipedia-size", "~25X", "more than 25X", "at least", "contradicted"),
    (
        "2021/text/recompute-loss",
        "leads to up to 33%",
        "leads to at most 33%",
        "at most",
        "confirmed",
    ),
    (
        "2022/text/gpt-3-flops",
        "introduces only 2.7%",
        "introduces at most 2.7%",
        "at most",
        "confirmed",
    ),
    ("2021/sizes/15b", "and 15 billion", "and about 15 billion", "about", "confirmed"),
    ("2022/section-4.3/extra-share", "less than 0.01%", "more than 0.01%", "at least", "confirmed"),
]


@pytest.mark.parametrize(
    ("name", "hedge", "flipped", "says", "outcome"), FLIPS, ids=[each[0] for each in FLIPS]
)
def test_a_flipped_hedge_turns_the_verdict(
    name: str, hedge: str, flipped: str, says: Says, outcome: str, kept: Results
) -> None:
    (experiment,) = (
        each
        for each in load_experiments().values()
        if any(claim.id == name for claim in each.claims)
    )
    before = {one.claim.id: one for one in judge([experiment], kept)}[name]
    assert before.claim.sentence.count(hedge) == 1
    assert {before.outcome, outcome} == {"confirmed", "contradicted"}
    other = before.claim.model_dump() | {
        "sentence": before.claim.sentence.replace(hedge, flipped),
        "says": says,
    }
    turned = experiment.model_copy()
    turned.__dict__["claims"] = tuple(
        Claim.model_validate(other) if claim.id == name else claim for claim in experiment.claims
    )
    assert {one.claim.id: one.outcome for one in judge([turned], kept)}[name] == outcome


@pytest.fixture(scope="module")
def kept() -> Results:
    return load_results([ROOT / "results" / "ablations"])


@pytest.mark.parametrize(
    ("column", "cell", "said"),
    [
        ("says", "roughly", "says"),
        ("protocol", "", "protocol"),
        ("value", "many", "value"),
        ("x", "far", "x"),
    ],
)
def test_a_claim_that_is_none_is_refused(column: str, cell: str, said: str, tmp_path: Path) -> None:
    with (CLAIMS / "megatron-lm-2019.csv").open(encoding="utf-8", newline="") as file:
        first, second = (row for _, row in zip(range(2), csv.DictReader(file), strict=False))
    with (tmp_path / "claims.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(first))
        writer.writeheader()
        writer.writerows((first, second | {column: cell}))
    with pytest.raises(BadInput, match=rf"claims\.csv line 3.*{said}"):
        load_claims(tmp_path)
