"""Language filter (the paper's langdetect step), made repeatable.

langdetect samples at random and adds probabilities in the order in which it read its profiles from the directory;
here the seed is 0 and the profiles are read in order of name, so that the answer is the same on every machine.
"""

from functools import cache
from pathlib import Path

from langdetect import LangDetectException
from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

from data_pipeline.document import Document, Drop


def keep_language(document: Document, code: str = "en") -> Document | Drop:
    """The document if it is in the language with that ISO 639-1 code; a text without a language is dropped."""
    detector = _factory().create()
    detector.append(document.text)
    try:
        found = detector.detect()
    except LangDetectException:
        return Drop("language not detectable")
    return document if found == code else Drop(f"language {found}")


@cache
def _factory() -> DetectorFactory:
    profiles = [
        path.read_text(encoding="utf-8")
        for path in sorted(Path(PROFILES_DIRECTORY).iterdir())
        if not path.name.startswith(".") and path.is_file()
    ]
    factory = DetectorFactory()
    factory.load_json_profile(profiles)
    factory.set_seed(0)
    return factory
