"""The stage `language`: a filter by langdetect, as in the paper."""

import platform
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from mlm_repro.data_pipeline.document import Drop
from mlm_repro.data_pipeline.stages.stage import Example, TextFilter

ENGLISH = (
    "The old friends walked along the river in the evening and talked about the weather of the"
    " summer."
)


class Language(TextFilter):
    """Keep the documents in one language, or in several. Langdetect, its seed fixed at 0, detects
    the language; a text is also dropped if no language is detectable, or if the detected one has a
    probability below `min_probability`."""

    name = verb = "language"
    examples = (
        Example(ENGLISH, ENGLISH),
        Example(
            "Der Hund lief schnell über die Straße, weil das Wetter am Abend schlechter wurde.",
            Drop("language de"),
        ),
        Example("", Drop("language not detectable")),
    )

    keep: str | tuple[str, ...] = "en"
    """The language that is kept, or several: codes of ISO 639-1 as langdetect has them, with
    `zh-cn` and `zh-tw`."""
    min_probability: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Smallest probability, by langdetect, with which a text counts as in a kept language."""

    @field_validator("keep")
    @classmethod
    def _is_known(cls, keep: str | tuple[str, ...]) -> str | tuple[str, ...]:
        library = find_spec("langdetect")
        folder = Path(str(library and library.origin)).with_name("profiles")
        known = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        for code in [keep] if isinstance(keep, str) else keep:
            if code not in known:
                raise ValueError(
                    f"`language.keep` has {code!r}, which langdetect does not know, but"
                    f" {', '.join(known)}; to keep every language leave the stage out of `stages`"
                )
        return keep

    @classmethod
    def made_with(cls) -> dict[str, Any]:
        """Return a dict of the version of langdetect, `langdetect`, whose profiles decide, its
        `seed`, 0, and the version of Python, `python`, whose float sum changed in 3.12."""
        from importlib.metadata import version

        return {"langdetect": version("langdetect"), "seed": 0, "python": platform.python_version()}

    def apply(self, text: str) -> str | Drop:
        """Return the text if it is in a kept language with at least the probability of the
        attribute `min_probability`, else a Drop. A text without a detectable language is
        dropped."""
        from mlm_repro.data_pipeline.fast.language import detect, probability

        language = detect(text)
        if language is None:
            return Drop("language not detectable")
        if language not in ([self.keep] if isinstance(self.keep, str) else self.keep):
            return Drop(f"language {language}")
        is_sure = not self.min_probability or probability(text) >= self.min_probability
        return text if is_sure else Drop(f"language {language} too uncertain")
