"""The fast language detection gives langdetect's language and the same bits of probability."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langdetect.detector_factory import DetectorFactory
from langdetect.utils.ngram import NGram

from mlm_repro.data_pipeline.fast import exact_langdetect, language
from mlm_repro.data_pipeline.fast.exact_langdetect import (
    _character_classes,
    _sum,
    fast_detect,
    tables_of,
)
from mlm_repro.data_pipeline.fast.language import (
    SAMPLES,
    detect,
    language_factory,
    reference_detection,
)
from mlm_repro.lineage.loops import call_first, compiled
from tests.data_pipeline.foreign_text import found_texts, made_texts, package_descriptions
from tests.made_data import ARTICLES, wikitext

ROOT = Path(__file__).resolve().parents[2]
FAST = fast_detect(tables_of(language_factory()))

PIECES = [
    "http://",
    "https://",
    "a@b",
    "@mail.example",
    "@",
    ".",
    "x" * 70,
    "word ",
    "the river ",
    "WENT ",
    "  ",
    "\u0301",
    "e",
    "Ơ",
    "ơ\u0323",
    "É",
    "é",
    "И",
    "собака ",
    "ñ",
    "\u1ec3",
    "ệ",
    "あ",
    "カ",
    "ㄅ",
    "한",
    "佼",
    "漢字",
    "ș",
    "ț",
    "ی",
    "\u200b",
    "\xa0",
    "«",
    "[",
    "_",
    "`",
    "\n",
    "\x00",
    "1",
    "ª",
    "ß",
    "Ⅷ",
    "ⓐ",
    "Ⓐ",
    "ǅ",
    "İ",
    "ı",
    "\ud800",
    "😀",
    "𝒜",
]


def assert_same(text: str) -> None:
    assert FAST(text) == reference_detection(text)


@pytest.mark.parametrize("text", SAMPLES)
def test_samples(text: str) -> None:
    assert_same(text)
    assert detect(text) == reference_detection(text)[0]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
@settings(max_examples=300)
def test_pieces_that_langdetect_treats_specially(text: str) -> None:
    assert_same(text)


@given(st.text(st.characters(codec=None, categories=None), max_size=60))
@settings(max_examples=300)
def test_any_characters(text: str) -> None:
    assert_same(text)


def test_every_language() -> None:
    texts = list(made_texts(per_language=5, seed=2))
    for text in texts:
        assert_same(text)
        assert_same(text[:60].upper())
    assert len({detect(text) for text in texts}) > 50


def test_real_text() -> None:
    for text in (
        *found_texts(150),
        *package_descriptions(),
        *wikitext(ARTICLES, seed=1).split("\n = "),
    ):
        assert_same(text[:4000])


def test_every_code_point_has_the_class_of_its_normal_character() -> None:
    factory = language_factory()
    classes, upper = _character_classes(factory)
    known = {letter for word in factory.word_lang_prob_map for letter in word}
    assert not any(chr(code).isupper() for code in range(0x20000, sys.maxunicode + 1))
    normals: dict[int, str] = {}
    for code in (*range(0x10000), *range(0x10000, sys.maxunicode, 7)):
        normal = NGram.normalize(chr(code))
        assert upper[classes[code]] == normal.isupper()
        assert normals.setdefault(classes[code], normal if normal in known else "") == (
            normal if normal in known else ""
        )
    reached = [normal for normal in normals.values() if normal]
    assert len(set(reached)) == len(reached) > 1000


@given(seed=st.integers(0, 10**6))
@settings(max_examples=25)
def test_long_texts_are_read_as_far_as_langdetect_reads_them(seed: int) -> None:
    rng = random.Random(seed)
    makers = (
        lambda: "http://" + "q" * rng.randrange(3000),
        lambda: "m" * rng.randrange(90) + "@" + "n" * rng.randrange(800) + " ",
        lambda: " " * rng.randrange(40),
        lambda: "some plain words in English here ",
        lambda: "eine lange Straße mit Bäumen ",
        lambda: "e\u0301o\u0323",
    )
    chosen = rng.sample(makers, 3)
    assert_same("".join(rng.choice(chosen)() for _ in range(rng.randrange(100, 600))))


@pytest.mark.parametrize(
    "part", ["x", "x.", "https://" + "y" * 2076, "z@" + "w" * 510, "@", " ", "e\u0301", "\n"]
)
def test_endless_repetition(part: str) -> None:
    assert_same(part * (200_000 // len(part)) + " and this is the end of the text")


def test_sums_are_compensated_as_in_python_3_12() -> None:
    def compensated(values: list[float]) -> float:
        total = rest = 0.0
        for value in values:
            new = total + value
            rest += (total - new) + value if abs(total) >= abs(value) else (value - new) + total
            total = new
        return total + rest

    rng = np.random.default_rng(1)
    for _ in range(200):
        values = 10.0 ** rng.uniform(-18, 0, 56)
        assert _sum(values, 55, True) == compensated(values[:55].tolist())
        assert _sum(values, 55, sys.version_info >= (3, 12)) == sum(values[:55].tolist())


def test_an_unknown_langdetect_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exact_langdetect, "SUPPORTED", "2.0")
    language._detection.cache_clear()
    try:
        assert [detect("Der Hund lief schnell über die Straße.") for _ in range(3)] == ["de"] * 3
    finally:
        language._detection.cache_clear()
    assert (
        capsys.readouterr().err.count(
            "warning: the fast language detection failed with RuntimeError"
        )
        == 1
    )


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    program = (
        "from mlm_repro.data_pipeline.fast.exact_langdetect import _probabilities as kernel\n"
        "from mlm_repro.data_pipeline.fast.language import detect\n"
        "assert detect('The dog ran over the road in the evening.') == 'en'\n"
        "print(sum(kernel.stats.cache_misses.values()))"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    assert sorted(process.communicate(timeout=600)[0].strip() for process in started) == [
        "0",
        "0",
        "1",
    ]


def test_kernels_compile_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = numba.njit

    def njit(*arguments: object, **options: object) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return keep(*arguments, **options)

    monkeypatch.setattr(numba, "njit", njit)
    assert call_first(compiled(lambda number: number + 1), 1) == 2


def test_checked_tables_are_kept_and_made_again_when_they_are_damaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = tmp_path / "mlm-repro" / "answers" / "languages.npz"
    text, made = "Der Hund lief schnell über die Straße.", list[DetectorFactory]()

    def note(factory: DetectorFactory) -> dict[str, np.ndarray]:
        made.append(factory)
        return tables_of(factory)

    monkeypatch.setattr(language, "tables_of", note)
    try:
        for damaged in (False, False, True, False):
            if damaged:
                kept.write_bytes(kept.read_bytes()[:-1])
            language._detection.cache_clear()
            assert language._detection()(text) == reference_detection(text)
    finally:
        language._detection.cache_clear()
    assert len(made) == 2
