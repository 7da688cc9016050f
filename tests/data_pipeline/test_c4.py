"""C4's rules beside a restatement of the paper's that reads signs one by one."""

import random
from collections import Counter

import pytest

from mlm_repro.data_pipeline.document import Drop
from mlm_repro.data_pipeline.stages.c4 import C4, PAGE

NOTICES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
    "javascript",
)


def without_markers(line: str) -> str:
    left, place = "", 0
    while place < len(line):
        end = line.find("]", place) if line[place] == "[" else -1
        inside = line[place + 1 : end]
        if end > 0 and (inside in ("", "edit", "citation needed") or inside.isdecimal()):
            place = end + 1
        else:
            left += line[place]
            place += 1
    return left


def sentences(text: str) -> int:
    count = 0
    for word in text.split():
        while word and word[-1] in "\"'`”’)]*_":
            word = word[:-1]
        count += word != "" and word[-1] in ".!?"
    return count


def restated(text: str) -> str | Drop:
    if "LOREM IPSUM" in text.upper():
        return Drop("lorem ipsum")
    if text.count("{") > 0:
        return Drop("curly bracket")
    kept = []
    for line in text.splitlines():
        line = without_markers(line).strip()
        plain = "".join(" " if sign.isspace() else sign for sign in line)
        words = [word for word in plain.split(" ") if word]
        notice = any(notice in line.lower() for notice in NOTICES)
        if len(words) > 4 and line[-1] in '.!?"”' and not notice:
            kept.append(line)
    return "\n".join(kept) if sentences("\n".join(kept)) > 2 else Drop("fewer than 3 sentences")


PIECES = [
    *("The mill stands by a river.", "It is late", "Who knows?", "So!", 'He said "no."', "Never”"),
    *("[1]", "[citation needed]", "[edit]", "[sic]", "[]", "[12", "Enable JavaScript now please."),
    *(
        "We use cookies on this page.",
        "See our Privacy Policy for more.",
        "and so on ...",
        "(Yes.)",
    ),
    *("five words are not few", "a 3.5 b", "*Ah!*", "", "\u00a0"),
]


def made(seed: int) -> str:
    """A page that breaks one rule or another, or none."""
    rng = random.Random(seed)
    lines = [" ".join(rng.choices(PIECES, k=rng.randrange(1, 5))) for _ in range(rng.randrange(9))]
    lines += [rng.choice(["{ x }", "Lorem  ipsum", "LOREM ipsum"])] * (rng.random() < 0.1)
    return "\n".join(lines)


def test_the_rules_are_the_papers() -> None:
    found = Counter[str]()
    for seed in range(3000):
        text = made(seed)
        expected = restated(text)
        assert C4().apply(text) == expected, text
        changed = "kept" if expected == text else "changed"
        found[expected.reason if isinstance(expected, Drop) else changed] += 1
    assert set(found) > {"lorem ipsum", "curly bracket", "fewer than 3 sentences", "changed"}
    assert min(found.values()) > 4, found


@pytest.mark.parametrize(
    "line",
    [
        "No mark ends this line of text",
        "Only four words here.",
        "Turn on JavaScript to read this page.",
        *(f"About the {notice.upper()} of our pages." for notice in NOTICES),
    ],
)
def test_each_rule_removes_its_line_alone(line: str) -> None:
    assert C4().apply(f"{line}\n{PAGE}") == C4().apply(PAGE) == PAGE


def test_hostile_texts_take_no_longer_than_their_length() -> None:
    for text in ("[" * 300_000, ". " * 150_000, "." * 300_000, "\n[1" * 100_000, '"' * 300_000):
        assert isinstance(C4().apply(text), str | Drop)
