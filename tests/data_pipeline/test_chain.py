"""A corpus of 5 MB with faults of every kind, beside a chain of libraries and plain loops that
shares no code with it.

ftfy and langdetect are called themselves, similarities are those of all pairs, test-set text is
sought word by word, the order is NumPy's generator, and token files are read by their published
layout.
"""

import bz2
import gzip
import json
import random
import re
import struct
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import ftfy
import langdetect
import numpy as np
import pytest
import zstandard
from langdetect.detector_factory import DetectorFactory
from tokenizers import Tokenizer

from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.data_pipeline.runner import build_dataset
from tests.data_pipeline.foreign_text import made_texts, package_descriptions
from tests.data_pipeline.test_near_duplicates import all_pairs

MOST_BYTES = 5_000_000
COMMON = "It is what they call a common phrase of many pages in the whole wide world today. "
TEST_SET = [
    (
        "Seventeen violet zebras quietly admire gentle umbrellas when thunder interrupts nine"
        " sleepy accordion players."
    ),
    (
        "A patient lighthouse keeper counted forty copper lanterns before the ferry crossed the"
        " frozen harbour at dawn."
    ),
    "Nine short words make up this whole passage here.",
]
END = "<|endoftext|>"
HIDDEN = re.compile(r"\u00ad|<[^<>]{1,2000}>|\]\([^()\s]{1,2000}\)")
"""What a reader does not see: a soft hyphen, a tag, the target of a link."""
Row = dict[str, Any]


def passages() -> Iterator[str]:
    """English, and code with English in it."""
    yield from (topics[name] for name in sorted(topics))
    yield from package_descriptions()
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted([*library.glob("*.py"), *library.glob("*/*.py")]):
        yield path.read_text(encoding="utf-8", errors="replace")[:20_000]


def edited(text: str, share: float, rng: random.Random) -> str:
    return " ".join(
        f"w{rng.randrange(10**6)}" if rng.random() < share else word for word in text.split(" ")
    )


def hidden(passage: str, way: int) -> str:
    """A passage as a page may have it."""
    words = passage.split()
    return [
        passage.upper(),
        passage.lower().replace(".", " ."),
        "\n".join(words),
        f"{passage[:20]}\u00ad{passage[20:]}",
        " ".join(f"<b>{word}</b>" for word in words),
        passage,
        f"[{passage}](https://example.org/a)",
    ][way % 7]


def planted_texts() -> list[str]:
    rng = random.Random(11)
    texts, size = list[str](), 0
    for text in passages():
        if size < 0.6 * MOST_BYTES and len(text) > 300:
            start = rng.randrange(max(1, len(text) - 3000)) if rng.random() < 0.5 else 0
            texts.append(text[start : start + 6000])
            size += len(texts[-1])
    base = list(texts)
    for number, text in enumerate(base):
        if number % 9 == 0:
            texts.append(text)
        if number % 5 == 0:
            texts.append(edited(text, 0.02 * (1 + number // 5 % 10), rng))
        if number % 23 == 0:
            texts.append(
                f"{text[:2000]}. {hidden(TEST_SET[number % 3], number // 23)} {text[2000:5000]}."
                " Then it ended."
            )
        if number % 31 == 0:
            texts.append(
                text.encode().decode(("latin-1", "cp1252", "cp1250")[number // 31 % 3], "replace")
            )
        if number % 37 == 0:
            texts.append(
                text.replace("e", "e\u0301", 9).replace("fi", "\ufb01").replace("'", "\u2019")
                + " &amp; &eacute;"
            )
        if number % 41 == 0:
            texts.append(f"{text[:800]} {' '.join(made_texts(1, number))[:900]}")
        if number % 13 == 0:
            texts.append(text[: rng.randrange(380, 460)])  # about 128 tokens
    texts += [
        *list(made_texts(1, 3))[:40],
        "",
        "   ",
        "\ufeff",
        "\n\n\t",
        "tail \ud800 of a \udc00 pair " * 60,
    ]
    texts += [f"{COMMON}{text[:3000]}" for text in base[3:300:25]]
    rng.shuffle(texts)
    return texts


def write(folder: Path, texts: list[str]) -> list[Row]:
    """Four files, with 11 bad lines among them; the documents in the order of their names."""
    rows = [{"url": f"page-{number}", "text": text} for number, text in enumerate(texts)]
    bad = [
        b"not json",
        b"{}",
        b'{"text": 5}',
        b'["text"]',
        b'{"text": "a\xff"}',
        b'{"text": null}',
        b"{",
        b'"text"',
        b"nul",
        b'{"text": "a" "b"}',
        b'{"txt": "a"}',
    ]
    packers = [
        ("a.jsonl", bytes),
        ("b.jsonl.gz", gzip.compress),
        ("c.jsonl.zst", zstandard.compress),
        ("d.jsonl.bz2", bz2.compress),
    ]
    for number, (name, pack) in enumerate(packers):
        share = [
            json.dumps(row).encode()
            for row in rows[number * len(rows) // 4 : (number + 1) * len(rows) // 4]
        ]
        (folder / name).write_bytes(
            pack(b"\n".join([*share[:5], *bad[number::4], *share[5:]]) + b"\n")
        )
    return rows


def kept_language(factory: DetectorFactory, text: str) -> bool:
    detector = factory.create()
    detector.append(text)
    try:
        return bool(detector.detect() == "en")
    except langdetect.LangDetectException:
        return False


def words_at(text: str) -> tuple[list[str], list[int]]:
    """Words in small letters and their places; what a reader does not see hides none."""
    seen = list[tuple[int, str]]()
    end = 0
    for mark in HIDDEN.finditer(text):
        seen += [(place, text[place]) for place in range(end, mark.start())]
        seen += [(mark.start(), " ")] if mark.group() != "\u00ad" else []
        end = mark.end()
    seen += [(place, text[place]) for place in range(end, len(text))]
    shown = "".join(letter for _, letter in seen)
    spans = list(re.finditer(r"\w+", shown))
    return [span.group().lower() for span in spans], [seen[span.start()][0] for span in spans]


def matches(text: str, ngrams: set[str]) -> list[tuple[int, str]]:
    """Place and words of each n-gram in a text, as it is and as it is seen."""
    shown = HIDDEN.sub(lambda mark: " " * (mark[0] != "\u00ad"), text)
    seen = set(re.findall(r"\w+", f"{text} {shown}".lower()))
    if not any(seen.issuperset(ngram.split(" ")) for ngram in ngrams):
        return []
    places = set()
    spans = list(re.finditer(r"\w+", text))
    for words, starts in (
        words_at(text),
        ([span.group().lower() for span in spans], [span.start() for span in spans]),
    ):
        for length in {ngram.count(" ") + 1 for ngram in ngrams}:
            for at in range(len(words) - length + 1):
                if (run := " ".join(words[at : at + length])) in ngrams:
                    places.add((starts[at], run))
    return sorted(places, key=lambda match: (match[0], -len(match[1])))


def cut(text: str, ngrams: set[str]) -> list[str] | None:
    """The parts that stay, as filter_ngrams.py of Megatron-LM cuts; None for a text that is
    dropped."""
    parts, begin = list[str](), 0
    for start, ngram in matches(text, ngrams):
        if start < begin:
            continue
        left, right = start - 200, start + len(ngram) + 200
        while left > begin and text[left] not in ".!?":
            left -= 1
        while right < len(text) and text[right] not in ".!?":
            right += 1
        if left > begin and left + 1 - begin > 200:
            parts.append(text[begin : left + 1])
        begin = right + 1
        if len(text) - begin <= 200:
            return parts if 0 < len(parts) <= 10 else None
    parts.append(text[begin:])
    return parts if len(parts) <= 10 else None


def read_tokens(prefix: Path) -> list[list[int]]:
    """Sequences of a token file by the layout of Megatron-LM's MMapIndexedDataset."""
    index = prefix.with_suffix(".idx").read_bytes()
    assert index[:9] == b"MMIDIDX\0\0"
    version, code, count, _ = struct.unpack_from("<QBQQ", index, 9)
    dtype = {4: "<i4", 8: "<u2"}[code]
    sizes = np.frombuffer(index, "<i4", count, 34)
    tokens = np.frombuffer(prefix.with_suffix(".bin").read_bytes(), dtype)
    assert version == 1
    return [part.tolist() for part in np.split(tokens, np.cumsum(sizes)[:-1])]


def test_nothing_differs_from_a_chain_of_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    texts = planted_texts()
    (tmp_path / "in").mkdir()
    rows = write(tmp_path / "in", texts)
    (tmp_path / "test.txt").write_text("\n".join(TEST_SET))
    config = DataConfig.model_validate(
        {
            "name": "chain",
            "workers": 1,
            "shard_bytes": 1 << 20,
            "sources": {
                "names": [f"jsonl:{tmp_path / 'in'}"],
                "id_key": "url",
                "max_bad_fraction": 0.1,
            },
            "decontaminate": {"test_sets": [f"text:{tmp_path / 'test.txt'}"]},
            "tokenizer": {"kind": "train", "vocab_size": 3000},
        }
    )
    made = build_dataset(config, tmp_path / "runs").path
    tokenizer = Tokenizer.from_file(str(made / "tokenizer" / "tokenizer.json"))

    profiles = [
        path.read_text()
        for path in sorted(Path(langdetect.__file__).with_name("profiles").iterdir())
        if path.is_file()
    ]
    factory = DetectorFactory()
    factory.load_json_profile(profiles)
    factory.set_seed(0)
    clean = [(row["url"], ftfy.fix_text(row["text"])) for row in rows]
    english = [
        (name, text) for name, text in clean if text.strip() and kept_language(factory, text)
    ]
    ids = {name: tokenizer.encode(text, add_special_tokens=False).ids for name, text in english}
    long = [(name, text) for name, text in english if len(ids[name]) + 1 >= 128]
    similar, kept, gone = all_pairs([text for _, text in long]), list[int](), list[Row]()
    for number, (name, _) in enumerate(long):
        near = [earlier for earlier in kept if similar[number, earlier] >= 0.7]
        if near:
            gone.append(
                {
                    "id": name,
                    "survivor": long[near[0]][0],
                    "jaccard": round(float(similar[number, near[0]]), 6),
                }
            )
        else:
            kept.append(number)
    sought = [re.findall(r"\w+", passage.lower()) for passage in TEST_SET]
    ngrams = {
        " ".join(words[at : at + 13]) for words in sought for at in range(max(1, len(words) - 12))
    }
    frequency = Counter(ngram for number in kept for _, ngram in matches(long[number][1], ngrams))
    rare = {ngram for ngram in ngrams if frequency[ngram] < 10}
    documents = list[tuple[str, str]]()
    for name, text in (long[number] for number in kept):
        if (parts := cut(text, rare)) == [text]:
            documents.append((name, text))
        else:
            documents += [(f"{name}#{number}", part) for number, part in enumerate(parts or ())]
    order = np.random.RandomState(1234).permutation(len(documents))
    valid = round(len(documents) / 30)

    assert sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) > 0.8 * MOST_BYTES
    assert len(clean) - len(english) > 40
    assert min(len(gone), len(documents), sum("#" in name for name, _ in documents)) > 10
    assert len(english) > len(long)
    quarantine = [json.loads(line) for line in (made / "quarantine.jsonl").read_text().splitlines()]
    assert len(quarantine) == 11
    listed = [json.loads(line) for line in (made / "duplicates.jsonl").read_text().splitlines()]
    assert [{key: row[key] for key in ("id", "survivor", "jaccard")} for row in listed] == gone
    for split, numbers in (("train", order[:-valid]), ("valid", order[-valid:])):
        written = [
            json.loads(line)
            for line in (made / "documents" / f"{split}.jsonl").read_text().splitlines()
        ]
        assert [(row["id"], row["text"]) for row in written] == [
            documents[number] for number in numbers
        ]
        encoded = [
            tokenizer.encode(text, add_special_tokens=False).ids
            for _, text in (documents[n] for n in numbers)
        ]
        end = tokenizer.token_to_id(END)
        assert read_tokens(made / f"{split}_text_document") == [[*each, end] for each in encoded]
