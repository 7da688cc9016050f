"""Words and sentences in token files, recognised from a table of the vocabulary.

A word begins at a token unless letters or digits run on from the token before it. A sentence ends
after a token whose text ends in `.`, `!` or `?` (quotes and brackets may follow) where the next
begins with white space; after a line break; at the end of a sequence of the file, so that files
that Megatron-LM has split into sentences keep theirs; and after `longest` tokens at the latest. A
full stop after an abbreviation ends a sentence too. The end-of-text token belongs to no sentence.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mlm_repro.data_pipeline.arrays import Integers
from mlm_repro.data_pipeline.tokens.token_file import TokenFile
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.lineage.loops import call_first, compiled

CLOSING = "\"'”’)]}"
PART_OF_CHARACTER = "\ufffd"
"""Decoded form of a token that is part of a character; treated as a letter."""

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Vocabulary:
    """Flags of each token of a vocabulary, boolean arrays [vocabulary], from which words and
    sentences are found, and the ids of end-of-text and of BERT's special tokens. The flags are of
    the token's text: it begins or ends in a letter, a digit or a part of a character, begins with
    white space, ends in `.`, `!` or `?`, closing quotes and brackets aside, or ends in a line
    break. `len` is the number of tokens in the vocabulary."""

    begins_in_word: Flags
    """True for a token whose text begins with a letter, a digit or a part of a character."""
    ends_in_word: Flags
    begins_with_space: Flags
    ends_sentence: Flags
    ends_line: Flags
    end_of_text: int
    special_ids: tuple[int, ...]
    """Ids of SPECIAL_TOKENS."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Return the Vocabulary of a tokenizer: flags of each of its tokens, found by decoding it
        alone, the id of end-of-text and the ids of [CLS], [SEP], [MASK] and [PAD] in this order:
        the tokenizer's own if it has all four, else the four ids after its last. The flags say that
        the token's text begins or ends with a letter, a digit or a part of a character, begins with
        white space, ends in `.`, `!` or `?`, closing quotes and brackets aside, or ends in a line
        break; all are False for a token without text."""
        texts = [tokenizer.text_of(token) for token in range(tokenizer.vocab_size)]

        def flags(test: Any) -> Flags:
            return np.array([bool(text) and test(text) for text in texts])

        return cls(
            begins_in_word=flags(lambda text: _in_word(text[0])),
            ends_in_word=flags(lambda text: _in_word(text[-1])),
            begins_with_space=flags(lambda text: text[0].isspace()),
            ends_sentence=flags(lambda text: text.rstrip(CLOSING)[-1:] in (".", "!", "?")),
            ends_line=flags(lambda text: text.endswith("\n")),
            end_of_text=tokenizer.end_of_text,
            special_ids=tokenizer.special_ids,
        )

    def __len__(self) -> int:
        return len(self.begins_in_word)

    def word_starts(self, tokens: Integers) -> Flags:
        """Return a boolean array [tokens] that is True for each of `tokens`, the ids of a text, at
        which a word begins: the first, and each except a token that begins with a letter or digit
        right after a token that ends with one."""
        runs_on = np.zeros(len(tokens), np.bool_)
        runs_on[1:] = self.begins_in_word[tokens[1:]] & self.ends_in_word[tokens[:-1]]
        return ~runs_on


@dataclass(frozen=True)
class Sentences:
    """The sentences of a token file, in arrays: the index of each one's first token and of the
    token after its last, counted through the file, and the index of each document's first sentence,
    then the number of all sentences."""

    starts: Integers
    """Index of the first token of each sentence among the file's tokens, [sentences]."""
    ends: Integers
    documents: Integers
    """Index of the first sentence of each document, then the number of sentences, [documents +
    1]."""

    @classmethod
    def of(cls, file: TokenFile, vocabulary: Vocabulary, longest: int) -> Self:
        """Return the Sentences of a token file, found by the flags of `vocabulary`. A sentence ends
        after a token that ends in `.`, `!` or `?`, closing quotes and brackets aside, if the next
        begins with white space; after a token that ends in a line break; at the end of a sequence;
        and after `longest` tokens at the latest. End-of-text belongs to no sentence and ends the
        one before it."""
        stops = np.cumsum(np.append(0, file.sizes))
        spans = [np.empty(0, np.int64)] * 2
        documents = np.zeros(len(file.document_index), np.int64)
        for _ in range(2):  # the first pass counts, the second fills arrays of that length
            count = call_first(
                _find,
                file.tokens,
                stops,
                file.document_index,
                vocabulary.ends_sentence,
                vocabulary.begins_with_space,
                vocabulary.ends_line,
                vocabulary.end_of_text,
                longest,
                *spans,
                documents,
            )
            if not len(spans[0]):
                spans = [np.empty(count, np.int64), np.empty(count, np.int64)]
        return cls(spans[0], spans[1], documents)


def _in_word(character: str) -> bool:
    return character.isalnum() or character == PART_OF_CHARACTER


@compiled
def _find(
    tokens: Any,
    stops: Any,
    document_index: Any,
    ends_sentence: Any,
    begins_with_space: Any,
    ends_line: Any,
    end_of_text: int,
    longest: int,
    starts: Any,
    ends: Any,
    documents: Any,
) -> int:
    """Find the sentences in `tokens`, the ids of a token file, and return their number. A sentence
    ends after a token with the flag `ends_line`; after one with `ends_sentence` if the next token
    has `begins_with_space`; at the end of a sequence; before the id `end_of_text`, which belongs to
    no sentence; and after `longest` tokens. Flags are arrays by token id.

    `stops` has 0 and the end of each sequence, `document_index` each document's first sequence,
    then the number of sequences. Writes to `starts` and `ends` the positions of each sentence's
    first token and of the token after its last, as far as these arrays have room: the caller can
    count first, with empty ones. Writes to `documents` the number of each document's first
    sentence, then the number of sentences.
    """
    count = 0
    for document in range(len(document_index) - 1):
        documents[document] = count
        for sequence in range(document_index[document], document_index[document + 1]):
            stop = stops[sequence + 1]
            start = stops[sequence]
            for position in range(stops[sequence], stop):
                token = tokens[position]
                end = position + (token != end_of_text)
                is_end = end in (position, stop) or ends_line[token] or end - start == longest
                if not is_end and ends_sentence[token]:
                    is_end = begins_with_space[tokens[end]]
                if is_end:
                    if end > start:
                        if count < len(starts):
                            starts[count] = start
                            ends[count] = end
                        count += 1
                    start = position + 1
    documents[len(documents) - 1] = count
    return count
