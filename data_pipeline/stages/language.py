"""Language filter (the paper's langdetect step)."""

import platform
from typing import Any

from data_pipeline.document import Drop
from data_pipeline.stages.stage import Example, TextFilter

ENGLISH = "The old friends walked along the river in the evening and talked about the weather of the summer."


class Language(TextFilter):
    """Keep the documents in one language. Language detection with langdetect, its seed fixed at 0."""

    name = verb = "language"
    after = "clean"
    examples = (
        Example(ENGLISH, ENGLISH),
        Example(
            "Der Hund lief schnell über die Straße, weil das Wetter am Abend schlechter wurde.", Drop("language de")
        ),
        Example("12345 67890 !!!", Drop("language not detectable")),
        Example("", Drop("language not detectable")),
    )

    keep: str = "en"
    """ISO 639-1 code of the language that is kept."""

    @classmethod
    def made_with(cls) -> dict[str, Any]:
        """Versions of langdetect's profiles and of Python, whose float sum changed in 3.12."""
        from importlib.metadata import version

        return {"langdetect": version("langdetect"), "seed": 0, "python": platform.python_version()}

    def apply(self, text: str) -> str | Drop:
        """The text if it is in the kept language; a text without a detectable language is dropped."""
        from data_pipeline.fast.language import detect

        language = detect(text)
        if language is None:
            return Drop("language not detectable")
        return text if language == self.keep else Drop(f"language {language}")
