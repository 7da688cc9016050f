"""Texts as a BERT reads them: [CLS] first [SEP] second [SEP], with the checkpoint's own tokenizer. Imports no torch.

A checkpoint of this suite has GPT-2's kind of tokenizer, whose special tokens follow its entries; one made by
`shard-hf` keeps a WordPiece vocabulary, in tokenizer.json or vocab.txt.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend
from tokenizers.implementations import BertWordPieceTokenizer

from data_pipeline.tokens.tokenizer import FILE_NAME
from lineage.errors import BadInput

SPECIAL = ("[CLS]", "[SEP]", "[PAD]")
LONGEST_QUESTION, LONGEST_QUESTION_WITH_OPTION = 64, 128
"""Tokens of a question in SQuAD, and of a question with an option in RACE, as in BERT's and Megatron-LM's code."""
STRIDE = 128
"""Tokens from one window of a long context to the next."""


class Sequence(NamedTuple):
    """A pair of texts as token ids."""

    tokens: list[int]
    second_start: int
    """Position of the second text's first token."""
    offsets: list[tuple[int, int]]
    """Characters of the second text that each of its tokens here stands for."""


@dataclass(frozen=True)
class PairEncoder:
    """A tokenizer and its special tokens."""

    backend: Any
    cls: int
    sep: int
    pad: int

    @classmethod
    def of(cls, checkpoint: Path) -> "PairEncoder":
        """The tokenizer of a checkpoint directory. Raises BadInput if it has none."""
        kept = checkpoint / "huggingface"
        if (path := checkpoint / "tokenizer" / FILE_NAME).is_file():
            backend: Any = Backend.from_file(str(path))
            first = backend.get_vocab_size()
            return cls(backend, first, first + 1, first + 3)
        if (path := kept / FILE_NAME).is_file():
            backend = Backend.from_file(str(path))
        elif (path := kept / "vocab.txt").is_file():
            backend = BertWordPieceTokenizer(str(path))
        else:
            raise BadInput(f"{checkpoint} has no tokenizer: neither {FILE_NAME} nor vocab.txt")
        for name in SPECIAL:
            if backend.token_to_id(name) is None:
                raise BadInput(f"{path} has no token {name}")
        return cls(backend, *[backend.token_to_id(name) for name in SPECIAL])

    def pair(self, first: str, second: str, length: int) -> Sequence:
        """Both texts in at most `length` tokens; what is too long is cut off the end of the longer."""
        a, b = self._encode(first), self._encode(second)
        room, sizes = length - 3, [len(a.ids), len(b.ids)]
        while sum(sizes) > room:
            sizes[sizes[1] >= sizes[0]] -= 1
        return self._join(a.ids[: sizes[0]], b.ids[: sizes[1]], b.offsets[: sizes[1]])

    def choice(self, option: str, passage: str, length: int) -> Sequence:
        """A question with its option, cut if need be, then as much of the passage as there is room for."""
        question = self._encode(option).ids[: min(LONGEST_QUESTION_WITH_OPTION, (length - 3) // 2)]
        text = self._encode(passage)
        room = length - 3 - len(question)
        return self._join(question, text.ids[:room], text.offsets[:room])

    def windows(self, question: str, context: str, length: int) -> Iterator[Sequence]:
        """A question with each window of a context; the windows overlap where it is too long for one."""
        asked = self._encode(question).ids[: min(LONGEST_QUESTION, (length - 3) // 2)]
        text = self._encode(context)
        room = length - 3 - len(asked)
        for start in range(0, max(len(text.ids), 1), min(STRIDE, max(room // 2, 1))):
            yield self._join(asked, text.ids[start : start + room], text.offsets[start : start + room])
            if start + room >= len(text.ids):
                return

    def _encode(self, text: str) -> Any:
        return self.backend.encode(text, add_special_tokens=False)

    def _join(self, a: list[int], b: list[int], offsets: list[tuple[int, int]]) -> Sequence:
        return Sequence([self.cls, *a, self.sep, *b, self.sep], len(a) + 2, list(offsets))
