"""Made files in the layout and with the markup of the published ones: WikiText-103, LAMBADA, a
byte-level BPE.

The text is of invented words, the same on every machine.
"""

import json
import random
import re
from pathlib import Path

from mlm_repro.data_pipeline.contamination.testsets import GPT2_FILES, TEST_SETS
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.engine.formats.vocabulary import write_vocabulary

ARTICLES, PASSAGES = 60, 400
VOCABULARY = 1200
NEWLINE_EXAMPLES = tuple(range(9, PASSAGES, 20))
"""Passages with a line break before the last word."""
MARKS = (",", ";", "<unk>", "'s", "@-@ like", "( 1 @,@ 000 )", "3 @.@ 5 %", '" once "', "– Łódź –")


def invented_passages(count: int, seed: int = 5) -> list[str]:
    """Texts of 150 words out of three thousand invented ones, the shorter the more frequent."""
    rng = random.Random(seed)
    parts = [a + b for a in "bcdfghklmnprst" for b in ("a", "e", "i", "o", "u", "an", "er", "ing")]
    words = sorted(
        ("".join(rng.choice(parts) for _ in range(rng.randint(1, 4))) for _ in range(3000)), key=len
    )
    return [
        " ".join(words[int(3000 * rng.random() ** 2)] for _ in range(150)) for _ in range(count)
    ]


def wikitext(articles: int, seed: int) -> str:
    """WikiText: headings between empty lines, spaces around every sign, marks inside words; one
    equation is a line."""
    rng = random.Random(seed)
    passages = iter(invented_passages(2 * articles, seed))
    lines = [""]
    for number in range(articles):
        lines += [
            "",
            f"= Title {number} of {rng.randint(1, 99)} =",
            "",
            marked(next(passages), rng),
        ]
        if number == articles // 2:
            lines += ["= 1 and so y ="]
        lines += ["", "= = History = =", "", marked(next(passages), rng), ""]
    return "".join(f" {line} \n" if line else " \n" for line in lines[1:])


def marked(passage: str, rng: random.Random) -> str:
    """The words with a sign after every thirtieth or so, ended by a full stop."""
    words = [
        f"{word} {rng.choice(MARKS)}" if rng.random() < 1 / 30 else word for word in passage.split()
    ]
    return f"{sentence(words)} ."


def sentence(words: list[str]) -> str:
    text = " ".join(words)
    return text[:1].upper() + text[1:]


def lambada(passages: int, seed: int) -> list[str]:
    """Passages of speech and paragraphs, each ended by a word."""
    rng = random.Random(seed)
    made = []
    for number, passage in enumerate(invented_passages(passages, seed)):
        *words, last = passage.split()[: rng.randint(40, 90)]
        at = rng.randint(10, 30)
        head = f'"{sentence(words[:at])}," she said.\n\n{sentence(words[at:])}'
        made.append(head + ("\n\n" if number in NEWLINE_EXAMPLES else " ") + last)
    return made


def write_made_data(folder: Path) -> Path:
    """Every file of a data directory, in `folder`."""
    passages = lambada(PASSAGES, seed=3)
    files = {
        "wikitext103": wikitext(ARTICLES, seed=1),
        "wikitext103-valid": wikitext(ARTICLES // 2, seed=1) + wikitext(ARTICLES // 2, seed=2),
        "wikitext2": wikitext(ARTICLES // 2, seed=1).replace("<unk>", "unseen"),
        "lambada": "".join(json.dumps({"text": passage}) + "\n" for passage in passages),
        "lambada-standard": "".join(
            " ".join(re.findall(r"\w+|[^\w\s]", passage.lower())) + "\n" for passage in passages
        ),
    }
    for name, content in files.items():
        path = folder / TEST_SETS[name].place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode("utf-8"))
    vocabulary = (folder / GPT2_FILES[0].place).parent
    write_vocabulary(
        Tokenizer.train([files["wikitext103"], *passages], VOCABULARY), vocabulary, seq_length=1024
    )
    for path in vocabulary.glob("tokenizer*.json"):
        path.unlink()
    return folder


def without_wikitext2() -> None:
    """Have no such test set: its file is in no folder of published files yet."""
    del TEST_SETS["wikitext2"]
