"""A number of a convention that the table lacks is rarely named, and one of the table is found from
two texts."""

import math
import random
import statistics

import pytest

from mlm_repro.evaluation.conventions.identify import find
from mlm_repro.evaluation.conventions.oracle import read_table
from mlm_repro.evaluation.conventions.table import Convention
from tests.commands import Command
from tests.evaluation import test_oracle
from tests.evaluation.test_oracle import Oracle, documents_of, spell

pytest.importorskip("transformers")
models, vocabulary, gpt2, llama = (
    test_oracle.models,
    test_oracle.vocabulary,
    test_oracle.gpt2,
    test_oracle.llama,
)
TEXTS = ("all", "wikitext")


@pytest.fixture(scope="session", params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> Oracle:
    """Each of the oracle's checkpoints."""
    chosen: Oracle = request.getfixturevalue(request.param)
    return chosen


@pytest.fixture(scope="session")
def conventions(model: Oracle) -> list[Convention]:
    return read_table(model.directory)


def foreign(text: str, model: Oracle) -> dict[str, float]:
    """Perplexities by forty conventions of no table of ours."""
    documents, losses, vocabulary = (
        documents_of(model.directory, text),
        model.losses["", "", ""],
        model.vocabulary,
    )
    end = vocabulary.eos_token_id
    whole = "\n\n".join(documents)

    def nats(text: str, size: int, stride: int, begun: bool = False) -> list[list[float]]:
        ids, done, made = spell(vocabulary, text, "a token"), 0, []
        for start in range(0, len(ids) - 1, stride):
            stop = min(start + size, len(ids))
            row = ((model.first or [end]) if begun else []) + ids[start:stop]
            fresh = min(stop - max(done, start + (not begun)), len(row) - 1)
            if fresh > 0:
                made.append([each for each, _ in losses(tuple(row))][-fresh:])
            done = max(done, stop)
        return made

    def mean(windows: list[list[float]]) -> float:
        flat = [each for window in windows for each in window]
        return sum(flat) / len(flat)

    apart = [nats(document, 24, 24, begun=True) for document in documents if document]
    means = [mean(each) for each in apart if each]
    disjoint = nats(whole, 32, 32)
    found = {f"disjoint {size}": mean(nats(whole, size, size)) for size in (6, 10, 14, 20, 24, 28)}
    found |= {f"stride {stride}": mean(nats(whole, 32, stride)) for stride in (2, 3, 5, 7, 12, 24)}
    found |= {f"{count} dropped": mean([each[count:] for each in disjoint]) for count in (2, 4, 8)}
    found |= {
        f"documents in {size}": mean(
            [window for document in documents for window in nats(document, size, size, True)]
        )
        for size in (8, 12, 20, 28)
    }
    found |= {f"begun {size}": mean(nats(whole, size, size, begun=True)) for size in (15, 23, 31)}
    found |= {
        "median of documents": statistics.median(means),
        "median of windows": statistics.median(map(mean1, disjoint)),
        "worst window": max(map(mean1, disjoint)),
        "half the windows": mean(disjoint[::2]),
        "median of sub-words": statistics.median(each for window in disjoint for each in window),
    }
    for base in (2.0, 10.0):
        found |= {
            f"{base} to the nats {n}": mean(nats(whole, n, n)) * math.log(base) for n in (32, 16)
        }
    joints = {
        "newline": "\n",
        "space": " ",
        "three newlines": "\n\n\n",
        "tab": "\t",
        "end twice": vocabulary.eos_token * 2,
    }
    found |= {
        f"joined by {name}": mean(nats(joint.join(documents), 32, 32))
        for name, joint in joints.items()
    }
    rewritten = {
        "upper": whole.upper(),
        "title": whole.title(),
        "collapsed": " ".join(whole.split()),
        "backwards": whole[::-1],
        "without digits": "".join(each for each in whole if not each.isdigit()),
        "twice": whole + whole,
        "last first": "\n\n".join(documents[::-1]),
    }
    found |= {name: mean(nats(text, 32, 32)) for name, text in rewritten.items()}
    return {name: math.exp(loss) for name, loss in found.items()}


def mean1(window: list[float]) -> float:
    return sum(window) / len(window)


def test_a_number_of_no_convention_is_rarely_named(
    model: Oracle, conventions: list[Convention]
) -> None:
    rng, trials = random.Random(5), dict[str, list[str]]()
    for text in TEXTS:
        known = [
            math.exp(each.values[text])
            for each in conventions
            if text in each.values and not each.is_share
        ]
        numbers = foreign(text, model)
        assert len(numbers) >= 40
        distinct = {
            name: each
            for name, each in numbers.items()
            if min(abs(each / one - 1) for one in known) > 1e-6
        }
        assert len(distinct) >= 36
        trials["{:.5g}"] = [*trials.get("{:.5g}", []), *map("{:#.5g}".format, distinct.values())]
        trials["{:.4g}"] = [*trials.get("{:.4g}", []), *map("{:#.4g}".format, distinct.values())]
    drawn = [rng.uniform(1000, 6000) for _ in range(100)] + [rng.uniform(7, 9) for _ in range(100)]
    drawn += [rng.uniform(7, 9) / math.log(2) for _ in range(100)]
    allowed = {"{:.5g}": 0.01, "{:.4g}": 0.02}
    for form, made in trials.items():
        for claims in (made, [f"{form[:2]}#{form[2:]}".format(each) for each in drawn]):
            named = [claim for claim in claims if find(claim, conventions).is_named]
            assert len(named) <= allowed[form] * len(claims), (form, len(claims), named)


def test_a_convention_of_the_table_is_named_from_six_digits_on_two_texts(
    conventions: list[Convention],
) -> None:
    of_texts = [each for each in conventions if "all" in each.values]
    asked, right = random.Random(2).sample(of_texts, 100), 0
    for each in asked:
        claim = f"all={math.exp(each.values['all']):.6g}"
        first = find(claim, conventions)
        if not first.is_named:
            second = first.next_text or "prose"
            first = find(f"{claim} {second}={math.exp(each.values[second]):.6g}", conventions)
        assert first.matches, (claim, each.axes)
        right += first.is_named and each.axes.items() <= first.matches[0].items()
    assert right >= 90, right


def test_the_chance_is_printed(
    model: Oracle, mlm_eval: Command, conventions: list[Convention]
) -> None:
    oracle = model.directory
    usual = next(each for each in conventions if each.weight == 1)
    ppl = math.exp(usual.values["all"])
    three, seven = (
        mlm_eval("oracle", "--out", oracle, "--identify", f"{ppl:#.{digits}g}", ends=0).out
        for digits in (3, 7)
    )
    assert "not certain: one of these, or with" in three
    assert "by accident" in three
    second = find(f"{ppl:#.7g}", conventions).next_text
    if not second:
        assert ": this, with 9" in seven
    else:  # another convention has the same number on this text
        assert f"run {second} next" in seven
    second = second or "prose"
    pair = f"all={ppl:#.6g} {second}={math.exp(usual.values[second]):#.6g}"
    assert ": this, with" in mlm_eval("oracle", "--out", oracle, "--identify", pair, ends=0).out
    for wrong in ("all=1 all=2", "all=1 2", "all=x", "verse=1"):
        assert mlm_eval("oracle", "--out", oracle, "--identify", wrong, ends=2).error
