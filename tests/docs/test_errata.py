"""Every erratum follows from the digits that stand in its quotations, and its command shows the
printed numbers."""

import math
import re
import shlex
from collections.abc import Callable, Sequence
from decimal import Decimal
from fnmatch import fnmatchcase

import pytest

from mlm_repro.experiments.catalogue import Erratum, every_claim, read_errata
from mlm_repro.experiments.cli import main
from mlm_repro.experiments.ranges import Range
from tests.architecture.rooms import ROOT
from tests.commands import Command
from tests.quotations import numbers

ERRATA = {erratum.title: erratum for erratum in read_errata().errata}
CLEARED = {each.words: each for each in read_errata().cleared}
PAGE = (ROOT / "docs" / "errata.md").read_text(encoding="utf-8")
PEAK = 312e12


def quoted(erratum: Erratum, place: str) -> str:
    """The words of the one quotation of this place."""
    (one,) = (each for each in erratum.quotations if each.place.startswith(place))
    return one.words


def row(table: str, name: str) -> list[Range]:
    """The printed numbers of a row that begins with `name`."""
    (line,) = (each for each in re.split(r", (?=\d+\.?\d*[BMT]\b)", table) if each.startswith(name))
    return [Range.printed(number) for number in numbers(re.sub(r"^\S+( \([^)]+\))?", "", line))]


def number(words: str, pattern: str) -> Range:
    """The number that the pattern's group finds."""
    found = re.search(pattern, words)
    assert found, (pattern, words)
    return Range.printed(Decimal(found[1].replace(",", "").replace(" ", "")))


def apart(one: Range, other: Range) -> bool:
    """True if no rounding makes them the same number."""
    return one.high < other.low or other.high < one.low


def shown(values: Sequence[float], form: str = "{:.1f} %") -> list[str]:
    return [form.format(value) for value in values]


def operations(hidden: float, layers: float, sequence: float, rows: float, again: float) -> float:
    """Per sequence: matrix products forward and, twice as many, backward; `again` times attention's
    two once more."""
    layer = 2 * sequence * (4 + 8) * hidden**2 + 2 * 2 * sequence**2 * hidden
    return (
        3 * (layers * layer + 2 * sequence * hidden * rows)
        + layers * again * 2 * 2 * sequence**2 * hidden
    )


def parameters(layers: int, hidden: int, rows: int) -> tuple[float, float]:
    """Numbers in the layers' matrices, biases and norms, and with embeddings of `rows` in all."""
    inside = layers * (12 * hidden**2 + 13 * hidden)
    return inside, inside + rows * hidden


def hardware_utilisation(erratum: Erratum) -> list[str]:
    table, models = quoted(erratum, "Table 5"), quoted(erratum, "Table 3")
    sequence, rows = (each.value for each in row("x " + quoted(erratum, "Section 6"), "x"))
    found: dict[str, list[float]] = {"model": [], "equation 8": [], "appendix": []}
    ratios: dict[str, list[float]] = {"printed": [], "equation 8": [], "appendix": []}
    for name in ("22B", "175B", "530B", "1T"):
        _, seconds, _, model, hardware = row(table, name)
        _, hidden, layers, _, _, gpus, batch, _ = (each.value for each in row(models, name))
        counts = [operations(hidden, layers, sequence, rows, times) for times in (0, 1, 3)]
        equation_8 = (
            72
            * layers
            * sequence
            * hidden**2
            * (1 + sequence / (3 * hidden) + rows / (12 * hidden * layers))
        )
        assert counts[2] == pytest.approx(equation_8), (
            "Equation 8 counts the two products three times"
        )
        of = [100 * batch * count / (seconds * gpus * PEAK) for count in counts]
        assert not apart(of[0], model)
        assert not apart(of[2], hardware)
        assert apart(of[1], hardware), f"{name}: rounding explains it"
        assert 0.5 <= round(hardware.value - of[1].value, 1) <= 1.3
        for kind, value in zip(found, (of[0], of[2], of[1]), strict=True):
            found[kind].append(value.value)
        for kind, ratio in zip(
            ratios,
            (hardware.value / model.value, counts[2] / counts[0], counts[1] / counts[0]),
            strict=True,
        ):
            ratios[kind].append(ratio)
    said = [
        ", ".join(shown(values[:-1], "{:.1f}")) + f" and {values[-1]:.1f} %"
        for values in found.values()
    ]
    said[2] = ", ".join(shown(found["appendix"][:-1])) + f" and {found['appendix'][-1]:.1f} %"
    return said + [
        ", ".join(shown(each[:-1], "{:.3f}")) + f" and {each[-1]:.3f}" for each in ratios.values()
    ]


def selective(erratum: Erratum) -> list[str]:
    assert "2Bs²h operations) and attention over values (2Bs²h" in quoted(erratum, "Appendix A")
    models = [each.words for each in erratum.quotations if each.words.startswith("For ")]
    printed = [Range.printed(each) for each in numbers(erratum.quotations[0].words)[:2]]
    said = []
    for words, claim in zip(models, printed, strict=True):
        _, sequence, hidden = map(float, numbers(words)[-3:])
        share = [
            100
            * (
                operations(hidden, 1, sequence, 0, times) / operations(hidden, 1, sequence, 0, 0)
                - 1
            )
            for times in (1, 3)
        ]
        assert not claim.low <= share[0] <= claim.high
        assert claim.low <= share[1] <= claim.high
        said += [f"{share[0]:.2f} %", f"{share[1]:.2f}"]
    return said


def outside_the_layers(erratum: Erratum) -> list[str]:
    heads, hidden, layers, *_ = (each.value for each in row(quoted(erratum, "Table 3"), "22B"))
    sequence, rows = map(float, numbers(quoted(erratum, "Section 6")))
    extra = 1 / layers + 4 / layers * (1 + rows / hidden)
    inside = 34 + 5 * heads * sequence / hidden
    share = 100 * extra / (inside + extra)
    assert share > number(erratum.quotations[0].words, r"less than ([\d.]+)%").high
    return [
        f"{share:.2f} %",
        f"{extra:.3f}",
        f"{inside:.1f}",
        f"{100 * extra / (34 + extra):.1f} %",
        f"{share / 100:.4f}",
    ]


def appendix_c(erratum: Erratum) -> list[str]:
    words, table = quoted(erratum, "Appendix C"), quoted(erratum, "Table 5")
    to = {
        "175B": (r"to ([\d.]+)%", r"\(\+([\d.]+)%\) and"),
        "530B": (r"and ([\d.]+)%", r"\(\+([\d.]+)%\), resp"),
    }
    gains = {name: number(words, end) - row(table, name)[3] for name, (end, _) in to.items()}
    printed = {name: number(words, gain) for name, (_, gain) in to.items()}
    assert apart(gains["175B"], printed["175B"])
    assert not apart(gains["530B"], printed["530B"])
    return [
        f"+{gains['175B'].value:.1f} %",
        f"{gains['175B'].low:.1f} to {gains['175B'].high:.1f}",
        f"+{printed['530B'].value}",
    ]


def whose_batch(erratum: Erratum) -> list[str]:
    table, models = quoted(erratum, "Table 5"), quoted(erratum, "Table 3")
    sequence, rows = map(float, numbers(quoted(erratum, "Section 6")))
    said: list[str] = []
    for name in ("175B", "530B"):
        _, seconds, _, model, _ = row(table, name)
        _, hidden, layers, _, _, gpus, batch, micro = (each.value for each in row(models, name))
        whole, small = (
            100 * each * operations(hidden, layers, sequence, rows, 0) / (seconds * gpus * PEAK)
            for each in (batch, micro)
        )
        assert not apart(whole, model)
        assert apart(small, model)
        said += [f"{batch:.0f}", f"{whole.value:.1f}", f"{small.value:.1f}"]
    return said


def points(erratum: Erratum) -> list[list[Range]]:
    """The two lists of points of a figure."""
    return [
        [Range.printed(each) for each in numbers(one.words)]
        for one in erratum.quotations
        if one.place.startswith("Figure")
    ]


def small_batches(erratum: Erratum) -> list[str]:
    losses = [100 * (1 - one / other) for one, other in zip(*points(erratum), strict=True)]
    assert (
        max(loss.high for loss in losses) < number(erratum.quotations[0].words, r"up to (\d+)%").low
    )
    most = max(loss.high for loss in losses)
    return [
        *shown([loss.value for loss in losses], "{:.0f} %"),
        f"{most:.0f} %",
        f"{100 * (1 - 3 / 4):.0f} %",
        f"{100 * (4 / 3 - 1):.0f} %",
    ]


def interleaved(erratum: Erratum) -> list[str]:
    gains = [100 * (one / other - 1) for one, other in zip(*points(erratum), strict=True)]
    most = number(quoted(erratum, "Section 1"), r"as much as (\d+)%")
    assert number(quoted(erratum, "abstract"), r"by (\d+)\+%").value == most.value
    assert max(gain.low for gain in gains) > 4 * most.value
    return shown([gain.value for gain in gains], "{:.0f} %")


def equation_4(erratum: Erratum) -> list[str]:
    printed = dict(re.findall(r"(\d+)lh ≫ (\(V \+ s\)|V)", quoted(erratum, "Section 5.1")))
    dropped = {
        re.findall(r"/(\d+)lh\)", quoted(erratum, "Equation 2"))[0]: "(V + s)",
        re.findall(r"/(\d+)lh\)", quoted(erratum, "Equation 3"))[0]: "V",
    }
    assert printed == {
        small: dropped[other] for small, other in zip(dropped, reversed(dropped), strict=True)
    }
    return [f"{factor}lh ≫ {term}" for factor, term in dropped.items()]


def two_definitions(erratum: Erratum) -> list[str]:
    batch, data_parallel, micro, stages = 48.0, 4.0, 2.0, 8.0
    microbatches = batch / (data_parallel * micro)
    definitions = {"B/b": batch / micro, "B/d": batch / data_parallel}
    assert "where b′ := B/b" in quoted(erratum, "Section 3.3.1")
    assert "define b′ as B/d" in quoted(erratum, "Section 3.4")
    assert definitions["B/b"] / data_parallel == microbatches, "the first is right where it stands"
    right = [
        words
        for words, value in definitions.items()
        if value / micro + stages - 1 == microbatches + stages - 1
    ]
    assert right == ["B/d"], "Equation 1 needs the second"
    return ["B/b", *right]


def chunks(erratum: Erratum) -> list[str]:
    ranks = float(numbers(erratum.quotations[0].words)[0])
    assert "one-eighth smaller" in erratum.quotations[0].words
    assert "reduced to bsh/t" in erratum.quotations[1].words
    assert 1 - 1 / ranks != 1 / ranks
    return ["one-eighth smaller", "one eighth as large"]


def figure_1(erratum: Erratum) -> list[str]:
    size = float(numbers(quoted(erratum, "Table 1"))[0])
    assert round(size, -1) == number(quoted(erratum, "Section 5.8"), r"with (\d+) billion").value
    assert "configuration in Figure 1" in quoted(erratum, "Section 5.8")
    assert "Trend of sizes" in quoted(erratum, "Figure 1")
    return ["Table 1", f"{size}B"]


def three_batches(erratum: Erratum) -> list[str]:
    drawn = {claim.series for claim in every_claim() if fnmatchcase(claim.id, "2021/figure-14/*")}
    curves = [int(each) for each in numbers(erratum.quotations[1].words)]
    assert {f"B={each}" for each in curves} == drawn
    assert "three different batch sizes" in erratum.quotations[0].words
    beside = {
        int(claim.series[2:])
        for claim in every_claim()
        if fnmatchcase(claim.id, "2021/figure-15/*")
    }
    return ["two curves", ", ".join(map(str, sorted(beside)[:-1])) + f" and {max(beside)}"]


def sizes(erratum: Erratum) -> list[str]:
    sequence, rows = 2048, 51_200
    assert numbers(quoted(erratum, "Section 5.1"))[0] == rows
    assert sequence in numbers(quoted(erratum, "Section 5.1"))
    said = []
    two, large, small = (quoted(erratum, f"Section {place}") for place in ("5.3.1", "5.4.1", "5.6"))
    for words, size, layers, hidden in (
        (two, r"and (\d+) billion parameters, and", r"(\d+) transformer layers and 15", 20_480),
        (two, r"and (\d+) billion parameters$", r"(\d+) transformer layers and 121", 20_480),
        (large, r"(\d+)-billion", r"(\d+) transformer layers", 20_480),
        (small, r"(\d+) billion", r"(\d+) transformer layers", 12_288),
    ):
        printed = number(words, size)
        inside, whole = (
            each / 1e9
            for each in parameters(int(number(words, layers).value), hidden, rows + sequence)
        )
        assert not printed.low <= whole <= printed.high
        assert printed.low <= inside <= printed.high
        said += [f"{inside:.1f}", f"{whole:.1f}B"]
    assert said[5] == "162.2B"
    assert "162.2 billion" in quoted(erratum, "Figure 13")
    assert quoted(erratum, "Table 1").startswith("145.6 96 12288 80 ")
    return said


def scaling_512(erratum: Erratum) -> list[str]:
    abstract, section = quoted(erratum, "abstract"), quoted(erratum, "Section 5.1.1")
    share = (
        100_000
        * number(abstract, r"sustain ([\d.]+) Peta")
        / (512 * number(abstract, r"sustains (\d+) Tera"))
    )
    assert "512 GPUs" in section
    assert apart(number(abstract, r"with (\d+)%"), number(section, r"(\d+)% scaling"))
    return [f"{share.value:.1f} %", f"{share.low:.1f} to {share.high:.1f} %"]


def bert_large(erratum: Erratum) -> list[str]:
    layers, hidden, _, _ = (int(each.value) for each in row(quoted(erratum, "Table 4"), "336M"))
    berts = int(number(quoted(erratum, "Section 4.2"), r"of ([\d,]+)\.").value)
    gpt_2s = int(number(quoted(erratum, "Section 5.1"), r"was ([\d,]+)").value)
    inside, bert = parameters(layers, hidden, berts + 512 + 2 * hidden)
    gpt_2 = parameters(layers, hidden, gpt_2s + 1024)[1]
    assert "BERT-large with 355M" in erratum.quotations[0].words
    assert "336M model has the same size as BERT-large" in erratum.quotations[1].words
    return [f"{bert / 1e6:.0f}M", f"{gpt_2 / 1e6:.0f}M", f"{inside / 1e6:.0f}M"]


def token_ratio(erratum: Erratum) -> list[str]:
    words = quoted(erratum, "Section 5.3")
    ratio = (
        number(words, r"for ([\d.]+) million iterations and").value
        / number(words, r"for (\d+) million").value
    )
    printed = numbers(quoted(erratum, "Table 5: trained").removeprefix("Megatron-3.9B"))[0]
    assert printed == 1
    assert math.floor(ratio + 0.5) == printed, "a question, for it rounds so"
    return [f"{ratio}", "a quarter less"]


def bert_sizes(erratum: Erratum) -> list[str]:
    layers, hidden, _, _ = (int(each.value) for each in row(quoted(erratum, "Table 4"), "3.9B"))
    rows = int(number(quoted(erratum, "Section 4.2"), r"of ([\d,]+)\.").value)
    inside, whole = parameters(layers, hidden, rows + 512 + 2 * hidden)
    assert f"{inside / 1e9:.1f}B" == quoted(erratum, "Table 6") == "3.8B"
    assert f"{whole / 1e9:.1f}B" == "3.9B"
    return [f"{inside / 1e9:.2f}B", f"{whole / 1e9:.2f}B"]


def which_corpus(erratum: Erratum) -> list[str]:
    corpus, split, before = (one.words for one in erratum.quotations)
    assert "174GB dataset" in corpus
    assert "(~4.5x larger than WebText)" in corpus
    assert split.replace("29:1", "95:5") == before
    return ["29:1", "174 GB"]


DERIVED: dict[str, Callable[[Erratum], list[str]]] = {
    "Hardware utilisation in Table 5": hardware_utilisation,
    "What selective recomputation costs": selective,
    "Activations outside the layers": outside_the_layers,
    "The gain in Appendix C": appendix_c,
    "Whose batch B is": whose_batch,
    "Recomputation at small batches": small_batches,
    "The gain of the interleaved schedule": interleaved,
    "What Equation 4 leaves out": equation_4,
    "Two definitions of b′": two_definitions,
    "Chunks of the scatter/gather optimisation": chunks,
    "A figure that is a table": figure_1,
    "Batch sizes of Figure 14": three_batches,
    "Sizes with and without embeddings": sizes,
    "Scaling to 512 GPUs": scaling_512,
    "The size of BERT-large": bert_large,
    "What the 3.9B BERT was trained on": token_ratio,
    "3.8B and 3.9B": bert_sizes,
    "Which corpus was split": which_corpus,
}
"""Each asserts that the document disagrees with itself, or what else the class says, and returns
words that follow."""


def test_every_erratum_is_derived() -> None:
    assert list(ERRATA) == list(DERIVED)


@pytest.mark.parametrize("title", ERRATA)
def test_an_erratum_follows_from_the_digits_in_its_quotations(title: str) -> None:
    erratum = ERRATA[title]
    said = f"{erratum.printed} | {erratum.follows} | {erratum.text}"
    for words in DERIVED[title](erratum):
        assert re.search(rf"(?<![\d.]){re.escape(words)}(?!\d)", said), (
            f"{title} does not say {words}"
        )


@pytest.mark.parametrize("title", ERRATA)
def test_what_is_printed_stands_in_a_quotation(title: str) -> None:
    erratum = ERRATA[title]
    quotations = " ".join(each.words for each in erratum.quotations)
    for printed in numbers(erratum.printed.replace("B ", " ").replace("%", "")):
        assert (
            printed in numbers(re.sub(r"[BM%x]\b|%", " ", quotations)) or f"{printed}" in quotations
        ), printed


@pytest.mark.parametrize("title", ERRATA)
def test_an_erratum_says_who_found_it_and_what_was_answered(title: str) -> None:
    erratum = ERRATA[title]
    assert len(erratum.quotations) > 1, "both places"
    assert all(each.place for each in erratum.quotations)
    assert erratum.found
    assert erratum.answered
    assert ("Megatron-LM#523" in erratum.found) == ("Jared Casper" in erratum.answered)


def test_what_was_cleared_is_no_erratum() -> None:
    """Every number in the reasons, once more."""
    claims = {claim.id: float(claim.value) for claim in every_claim()}
    curve = [claims[name] for name in claims if name.startswith("2021/figure-16/b=128/")]
    ends = [claims[name] for name in claims if name.startswith("2021/figure-13/b=32/")]
    shares = [
        100 * (34 / 8) / (10 + 24 / 8 + 5 * heads * 2048 / (8 * hidden))
        for heads, hidden in ((64, 6_144), (96, 12_288), (128, 20_480))
    ]
    months = 8 * 450e9 * 1008.0e9 / 37.6e15 / (86_400 * 365.25 / 12)
    size = Range.printed(Decimal("8.3")) / Range.printed(Decimal("1.5"))
    expected = {
        "did not fit on 560 GPUs": ["640"],
        "by 15%": [
            f"{100 * (max(curve) / min(curve) - 1):.0f} %",
            f"{max(curve):.0f} over {min(curve):.0f}",
        ],
        "2× lower": [f"{max(ends) / min(ends):.2f}", f"{max(ends):.0f} over {min(ends):.0f}"],
        "about 40 months": [f"{months:.1f} months"],
        "13.8 terabytes": [f"{14 * 1008:,} GB", f"{14 * 1008 / 1024:.1f} times 1,024 GB"],
        "under 20%": [*shown(shares), "20.2 rounds to 20"],
        "5.6x the size": [f"{size.value:.2f}", f"{size.low:.2f} to {size.high:.2f}"],
        "of 12.68": ["12.76"],
        "clip value of 10": ["min(r1/r2, 10)"],
        "benefits vanished": ["about 10 %"],
    }
    assert len(expected) == len(CLEARED)
    for words, derived in expected.items():
        (cleared,) = (each for each in CLEARED.values() if words in each.words)
        for each in derived:
            assert each in cleared.reason or each in cleared.words, f"{words}: {each}"


@pytest.mark.parametrize("title", ERRATA)
def test_a_command_shows_the_printed_numbers(title: str, command: Command) -> None:
    erratum = ERRATA[title]
    done = command(main, *shlex.split(erratum.command))
    assert done.code in (0, 3), done.err
    rows = {line.partition(" ")[0]: line for line in done.out.splitlines()}
    claims = {
        claim.id: claim
        for claim in every_claim()
        if any(fnmatchcase(claim.id, each) for each in erratum.claims)
    }
    for name, claim in claims.items():
        assert claim.published in rows[name]


def test_the_page_opens_with_the_one_that_matters() -> None:
    head = PAGE.split("<!-- generated")[0]
    assert "Table 5" in head.split("**")[1]  # what stands in bold first
    assert "It matters because" in head
    assert PAGE.count("\n## ") == len(ERRATA) + 1
