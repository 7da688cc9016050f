"""Text in many languages: made from langdetect's profiles, and read from what is installed here."""

import gettext
import gzip
import random
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from mlm_repro.data_pipeline.fast.language import language_factory

SHARE = Path("/usr/share")


def made_texts(per_language: int, seed: int) -> Iterator[str]:
    """N-grams of each language's profile in random order: text that no person wrote, in 55
    languages."""
    rng = random.Random(seed)
    grams: dict[int, list[str]] = {}
    for gram, probabilities in language_factory().word_lang_prob_map.items():
        grams.setdefault(max(range(len(probabilities)), key=probabilities.__getitem__), []).append(
            gram
        )
    for _, own in sorted(grams.items()):
        for _ in range(per_language):
            yield "".join(rng.choices(own, k=rng.randint(1, 200)))


def package_descriptions() -> Iterator[str]:
    """What the installed Python packages say of themselves."""
    for path in sorted(Path(sysconfig.get_path("purelib")).glob("*.dist-info/METADATA")):
        yield path.read_text(encoding="utf-8", errors="surrogateescape")


def found_texts(count: int) -> list[str]:
    """Up to `count` translated manual pages and up to `count` pieces of translated messages of
    programs."""
    pages = sorted(SHARE.glob("man/[a-z][a-z]*/man*/*.gz"))
    catalogues = sorted(SHARE.glob("**/LC_MESSAGES/*.mo"))
    rng = random.Random(1)
    rng.shuffle(pages)
    rng.shuffle(catalogues)
    return [*islice(_pages(pages), count), *islice(_messages(catalogues), count)]


def _pages(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        yield gzip.decompress(path.read_bytes()).decode("utf-8", "surrogateescape")


def _messages(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        try:
            with path.open("rb") as file:
                messages = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
        except (OSError, UnicodeDecodeError):
            continue
        yield "\n".join(
            text for key, text in islice(messages.items(), 1, 41) if isinstance(text, str)
        )
