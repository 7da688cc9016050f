"""Pairs of texts as a BERT reads them: [CLS] first [SEP] second [SEP]. Imports no torch.

A checkpoint of this suite has GPT-2's kind of tokenizer; the special tokens follow its entries. A checkpoint made by
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
"""Longest question of SQuAD, and longest question with an option of RACE, in tokens (BERT's and Megatron-LM's code)."""
STRIDE = 128
"""Tokens from the start of a window of a long context to the start of the next."""


class EncodedPair(NamedTuple):
    """A pair of texts as token ids."""

    tokens: list[int]
    second_start: int
    """Position of the first token of the second text."""
    offsets: list[tuple[int, int]]
    """Character range of each token of the second text."""


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
        if (path := checkpoint / "tokenizer" / FILE_NAME).is_file():
            backend: Any = Backend.from_file(str(path))
            first = backend.get_vocab_size()
            return cls(backend, first, first + 1, first + 3)
        if (path := checkpoint / "huggingface" / FILE_NAME).is_file():
            backend = Backend.from_file(str(path))
        elif (path := path.with_name("vocab.txt")).is_file():
            backend = BertWordPieceTokenizer(str(path))
        else:
            raise BadInput(f"{checkpoint} has no tokenizer: neither {FILE_NAME} nor vocab.txt")
        special = [backend.token_to_id(name) for name in SPECIAL]
        if None in special:
            raise BadInput(f"{path} has no token {SPECIAL[special.index(None)]}")
        return cls(backend, *special)

    def pair(self, first: str, second: str, length: int) -> EncodedPair:
        """Both texts in at most `length` tokens; the longer text loses tokens at its end."""
        a, b = self._encode(first), self._encode(second)
        room, sizes = length - 3, [len(a.ids), len(b.ids)]
        while sum(sizes) > room:
            sizes[sizes[1] >= sizes[0]] -= 1
        return self._join(a.ids[: sizes[0]], b.ids[: sizes[1]], b.offsets[: sizes[1]])

    def choice(self, option: str, passage: str, length: int) -> EncodedPair:
        """A question with an option, then as much of the passage as fits."""
        return next(self.windows(option, passage, length, LONGEST_QUESTION_WITH_OPTION))

    def windows(
        self, question: str, context: str, length: int, longest: int = LONGEST_QUESTION
    ) -> Iterator[EncodedPair]:
        """The question, cut at `longest` tokens, with each window of the context; several windows overlap."""
        asked, text = self._encode(question).ids[: min(longest, (length - 3) // 2)], self._encode(context)
        room = length - 3 - len(asked)
        for start in range(0, max(len(text.ids), 1), min(STRIDE, max(room // 2, 1))):
            yield self._join(asked, text.ids[start : start + room], text.offsets[start : start + room])
            if start + room >= len(text.ids):
                return

    def _encode(self, text: str) -> Any:
        return self.backend.encode(text, add_special_tokens=False)

    def _join(self, a: list[int], b: list[int], offsets: list[tuple[int, int]]) -> EncodedPair:
        return EncodedPair([self.cls, *a, self.sep, *b, self.sep], len(a) + 2, list(offsets))
