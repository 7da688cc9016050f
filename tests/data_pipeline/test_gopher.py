"""Gopher's rules beside a restatement of the paper's that goes through words and characters one by
one."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.corpora import words
from mlm_repro.data_pipeline.document import Drop
from mlm_repro.data_pipeline.stages.gopher import PAGE, Gopher
from tests.commands import Command
from tests.data_pipeline.conftest import write_jsonl

TOP, AGAIN = {2: 20, 3: 18, 4: 16}, {5: 15, 6: 14, 7: 13, 8: 12, 9: 11, 10: 10}
"""Table A1, in percent."""


def covered(parts: list[str], wanted: list[tuple[int, int]]) -> float:
    """Percent of the characters of the parts that lie in ranges of them."""
    inside = [any(first <= place < end for first, end in wanted) for place in range(len(parts))]
    return (
        100
        * sum(len(part) for part, is_in in zip(parts, inside, strict=True) if is_in)
        / sum(map(len, parts))
    )


def repeated(parts: list[str], n: int) -> list[tuple[int, int]]:
    seen, ranges = [], []
    for place in range(len(parts) - n + 1):
        if parts[place : place + n] in seen:
            ranges.append((place, place + n))
        seen.append(parts[place : place + n])
    return ranges


def most_frequent(parts: list[str], n: int) -> list[tuple[int, int]]:
    grams = [" ".join(parts[place : place + n]) for place in range(len(parts) - n + 1)]
    count = Counter(grams)
    top = next(gram for gram in grams if count[gram] == max(count.values()))
    return [(place, place + n) for place, gram in enumerate(grams) if gram == top]


def restated(text: str) -> str:
    tokens = text.split()
    lines = [line for line in text.split("\n") if line.strip()]
    if len(tokens) < 50 or len(tokens) > 100_000:
        return "words not 50 to 100,000"
    mean = sum(len(token) for token in tokens) / len(tokens)
    if mean < 3 or mean > 10:
        return "mean word length not 3 to 10"
    if text.count("#") * 10 > len(tokens):
        return "hashes"
    if (text.count("...") + text.count("…")) * 10 > len(tokens):
        return "ellipses"
    if sum(line.strip()[0] in "•‣◦▪*-" for line in lines) * 10 > 9 * len(lines):
        return "bullet points"
    if sum(
        line.rstrip()[-1] == "…" or line.rstrip()[-3:] == "..." for line in lines
    ) * 10 > 3 * len(lines):
        return "lines that end with an ellipsis"
    if sum(any(sign.isalpha() for sign in token) for token in tokens) * 10 < 8 * len(tokens):
        return "words without a letter"
    kept = "".join(sign if sign.isalnum() else " " for sign in text.lower()).split()
    if sum(stop in kept for stop in ("the", "be", "to", "of", "and", "that", "have", "with")) < 2:
        return "fewer than 2 stop words"
    joined, blocks = [line.replace(" ", "") for line in lines], [""]
    for line in text.split("\n"):
        blocks[-1] += line.replace(" ", "")
        blocks += [""] * (not line.strip())
    for name, parts in (("lines", joined), ("paragraphs", [block for block in blocks if block])):
        again = repeated(parts, 1)
        if len(again) * 10 > 3 * len(parts):
            return f"repeated {name}"
        if covered(parts, again) > 20:
            return f"characters of repeated {name}"
    for n in range(2, 11):
        share = covered(tokens, most_frequent(tokens, n) if n in TOP else repeated(tokens, n))
        if share > (TOP | AGAIN)[n]:
            return f"{n}-grams"
    return ""


def made(seed: int) -> str:
    """A text that breaks one rule or another, or none."""
    rng = random.Random(seed)
    sentence = ["the", "and", *words(rng, rng.choice([60, 90])).split()]
    filling = rng.choice(
        ["#", "...", "17", "a", "of", words(rng, 1) * 9, words(rng, rng.randrange(2, 14))]
    )
    for _ in range(rng.randrange(12)):
        sentence.insert(rng.randrange(len(sentence)), filling)
    lines, size = [], rng.choice([6, 15, 200])
    for start in range(0, len(sentence), size):
        lines.append(
            rng.choice(["", "", "- ", "• "][: rng.choice([2, 4])])
            + " ".join(sentence[start : start + size])
        )
    lines += rng.choices(lines, k=rng.choice([0, 0, 1, 3]))
    ends = rng.choice([["\n"], ["\n", "\n\n", "...\n"], ["\n\n"]])
    return "".join(line + rng.choice(ends) for line in lines)


def test_the_rules_are_the_papers() -> None:
    found = Counter[str]()
    for seed in range(1500):
        text = made(seed)
        expected, outcome = restated(text), Gopher().apply(text)
        assert outcome == (Drop(expected) if expected else text), text
        found[expected] += 1
    print(found)
    assert found[""] > 100
    assert len(found) > 9


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("the and " + "word " * 100_000, "words not 50 to 100,000"),
        ("• " + PAGE.replace(", ", "\n• ").replace("; ", "\n• "), "bullet points"),
        (PAGE.replace(" ", " 1 "), "mean word length not 3 to 10"),
        (PAGE.replace(" ", " 12345 "), "words without a letter"),
        (re.sub(r"\b(the|be|to|of|and|that|have|with)\b", "some", PAGE), "fewer than 2 stop words"),
        (f"{PAGE}\n{PAGE}", "repeated lines"),
        (PAGE + " come and see it all" * 5, "4-grams"),
    ],
)
def test_each_rule_drops(text: str, rule: str) -> None:
    assert (restated(text) if len(text) < 10_000 else rule) == rule
    assert Gopher().apply(text) == Drop(rule)


def test_hostile_texts_take_no_longer_than_their_length() -> None:
    for text in ("=" * 300_000, " " * 300_000, "\n-" * 100_000, "." * 300_000, "_ " * 150_000):
        assert isinstance(Gopher().apply(text), Drop)


def test_what_is_dropped_is_kept_with_stage_and_reason(cli: Command) -> None:
    rng = random.Random(1)
    long = [f"the and {words(rng, 200)}" for _ in range(3)]
    pages = [PAGE, "The sun rose.", f"{PAGE}\n{PAGE}", long[0], f"{long[0]} It was late."]
    write_jsonl(Path("a.jsonl"), pages)
    write_jsonl(Path("b.jsonl"), long[1:])
    Path("r.toml").write_text(
        'name = "kept"\nworkers = 1\nstages = ["gopher", "length", "deduplicate", "split",'
        ' "tokenize"]\nsources.names = ["jsonl:a.jsonl", "jsonl:b.jsonl"]\ntokenizer = {kind ='
        ' "train", vocab_size = 300}\nlength.min_tokens = 400\n'
    )
    cli("run", "r.toml", ends=0)
    assert not Path("runs/kept/dropped.jsonl").exists()
    cli("run", "r.toml", "--runs", "more", "--set", "keep_dropped=true", ends=0)
    cli("run", "r.toml", "--runs", "two", "--set", "keep_dropped=true", "--workers", 2, ends=0)
    kept = Path("more/kept/dropped.jsonl").read_bytes()
    assert Path("two/kept/dropped.jsonl").read_bytes() == kept
    rows = [json.loads(line) for line in kept.splitlines()]
    stages = {
        each["name"]: each
        for each in json.loads(Path("more/kept/ledger.json").read_text())["stages"]
    }
    for name, stage in stages.items():
        own = Counter(row["reason"] for row in rows if row["stage"] == name)
        assert own == {
            reason: amount["documents"] for reason, amount in stage["dropped"].items()
        }, name
    assert {row["stage"] for row in rows} == {"gopher", "length", "deduplicate"}
    assert [row["text"] for row in rows] == [*pages[1:3], pages[0], pages[4]]
    for each in ("documents/train.jsonl", "train_text_document.bin"):
        assert Path("runs/kept", each).read_bytes() == Path("more/kept", each).read_bytes()
