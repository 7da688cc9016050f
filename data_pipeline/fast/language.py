"""The language of a text as langdetect finds it, made repeatable.

langdetect samples at random and adds probabilities in the order in which it read its profiles from
the directory; here the seed is 0 and the profiles are read in order of name, so that the answer is
the same on every machine.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

from langdetect import LangDetectException
from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

from mlm_repro.data_pipeline.fast.exact import checked_with_tables
from mlm_repro.data_pipeline.fast.exact_langdetect import Detection, fast_detect, tables_of

SAMPLES = (
    "",
    "12345 67890 !!!",
    "Two people met at the river, and WENT HOME Early.  It was a  wet day; ÉTÉ, ÄÖÜ, NASA.",
    (
        "See https://example.org/a?b=c#d or write to some.one@mail.example.org: the answer is in"
        " the second letter."
    ),
    "Der Hund lief schnell über die Straße, weil das Wetter am Abend schlechter wurde.",
    "Sint in te pro et a no in me",
    "În această țară și în orașul său, oamenii știu să trăiască frumos.",
    (
        "Tie\u0302\u0301ng Vie\u0323\u0302t co\u0301 nhie\u0300u da\u0301u, tiếng Việt được viết"
        " bằng chữ Quốc ngữ."
    ),
    "ể ệ ễ ở ừ ự am",
    "Собака быстро бежала по улице, потому что the weather вечером испортилась.",
    "این یک متن فارسی است که برای آزمون نوشته شده است. هذا نص عربي.",
    "これは日本語の文章です。カタカナもあります。",
    "這是一段中文文字,用來測試語言。这是一段中文文字。",
    "이것은 한국어 문장입니다.",
    "ภาษาไทยเป็นภาษาที่มีวรรณยุกต์",
    "plain words \ud800 \U0001f600 \U0001f130\U0001f131 \x00 ﬁn \u2028 \u00a0 ǅ ㄅㄆ",
    "mail@" + "a" * 700 + " https://" + "b" * 2100 + " the end of this text is here",
    "the words of this text are repeated until it is too long " * 220,
)


def detect(text: str) -> str | None:
    """Return the code of the language that langdetect finds, such as "en", "unknown" if none is
    likely, or None if the text has no features."""
    return _detection()(text)[0]


def probability(text: str) -> float:
    """Return the probability, from 0 to 1, of the likeliest language, also if the probability is
    too small for `detect` to name the language; 0 for a text without features."""
    return max(_detection()(text)[1], default=0.0)


def reference_detection(text: str) -> Detection:
    """Return what langdetect itself computes, with seed 0: a pair of the likeliest language, or
    "unknown", and a tuple of the probabilities of all its languages, in order of the profiles'
    names; None and an empty tuple for a text without features."""
    detector = language_factory().create()
    detector.append(text)
    try:
        language = detector.detect()
    except LangDetectException:
        return None, ()
    return language, tuple(detector.langprob)


@cache
def _detection() -> Callable[[str], Detection]:
    """Return the function from a text to its Detection, a pair: the language, and a tuple of the
    probabilities of all languages, in a fixed order; None and () for a text without features. It is
    the fast one, or `reference_detection`, which calls langdetect, if the fast one fails or differs
    on one of `SAMPLES`, which is announced on standard error. If the fast one is returned, its
    tables are cached on disk, and langdetect's own are freed."""
    detection = checked_with_tables(
        "language detection",
        ("languages", "langdetect"),
        lambda: tables_of(language_factory()),
        fast_detect,
        reference_detection,
        SAMPLES,
    )
    if detection is not reference_detection:
        language_factory.cache_clear()
    return detection


@cache
def language_factory() -> DetectorFactory:
    """Return langdetect's factory of detectors, with seed 0 and profiles in order of name."""
    profiles = [
        path.read_text(encoding="utf-8")
        for path in sorted(Path(PROFILES_DIRECTORY).iterdir())
        if not path.name.startswith(".") and path.is_file()
    ]
    factory = DetectorFactory()
    factory.load_json_profile(profiles)
    factory.set_seed(0)
    return factory
