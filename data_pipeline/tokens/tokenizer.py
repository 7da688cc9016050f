"""GPT-2's byte-level BPE, with the published vocabulary or one of any size trained on text, and
vocabularies of words.

Text is encoded by fastokens, which is compared with Hugging Face `tokenizers` when a vocabulary is
first used. Other kinds of tokenizers that can be read are encoded by `tokenizers`.

No special token is recognised in text: the literal `<|endoftext|>` is split like any other
characters, as in Megatron-LM; only the pipeline writes the end-of-text token.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from mlm_repro.data_pipeline.arrays import Integers32
from mlm_repro.data_pipeline.fast.exact import checked
from mlm_repro.data_pipeline.tokens.special_tokens import SPECIAL_TOKENS
from mlm_repro.lineage.atomic import JSON, parse_json, read_bytes, read_json, write_json, write_text
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from mlm_repro.lineage.processes import heard

END_OF_TEXT = "<|endoftext|>"
FILE_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
OTHER_IDS = (
    "dropout",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "byte_fallback",
    "ignore_merges",
)
"""Settings of BPE that change ids and that GPT-2 does not use."""
MOST_GROWTH = 16
"""Largest number of characters that normalization may make of one character."""
NAMES = 8
"""Largest number of special tokens that an error names."""
MOST_BYTES = 64 << 20
"""Largest accepted tokenizer.json; GPT-2's has two million bytes."""
LONG_TEXT = 1 << 18
"""Length in characters from which encoding must not delay Ctrl-C: one word of 64 million characters
takes a minute."""
CHECKED_TEXTS = (
    "It's they'll we're I've 'D' don''t rock'n'roll 's",
    "  two  spaces,\ttabs\t\t and\r\n\r\n lines \n",
    "\u00a0no\u00a0\u00a0break\u3000wide\u2028line \x85\x1c\x0b",
    (
        "x2 ½ ٣٤ Ⅷ 第十二 12,345.67e-8 naïve cafe\u0301 Straße ΑΒΓ русский язык हिन्दी ภาษาไทย"
        " 日本語のテキスト 한국어"
    ),
    "🙂👩‍👩‍👧 \U00011de1\U00020000\U000323b0\U000e0041\U0010ffff \ufeff\x00\x7f",
    "def f(x):\n    return {**x, 'a': [1, 2]}  # <|endoftext|>\n",
    "pneumonoultramicroscopicsilicovolcanoconiosis " + "ab" * 100 + "=" * 70 + " " * 40,
)
"""Texts that the fast encoder must encode as `tokenizers` does before it is used."""


def padded_vocab_size(vocab_size: int, multiple: int = 128, tp: int = 1) -> int:
    """Return the smallest multiple of `multiple * tp` that is at least `vocab_size` (Megatron-LM
    _vocab_size_with_padding)."""
    step = multiple * tp
    return -(-vocab_size // step) * step


class Tokenizer:
    """Encoder of text as token ids, and decoder of token ids, by `backend`, a tokenizer of the
    library `tokenizers`. `backend` is changed: it then treats special tokens in a text like other
    characters and neither cuts nor pads. Raises BadInput if the vocabulary lacks `end_token`, the
    token that ends a text, by default `<|endoftext|>`."""

    end_of_text: int
    """Id of the token that ends a document."""
    first_tokens: tuple[int, ...] = ()
    """Ids of tokens to put before every text; this tokenizer has none."""

    def __init__(self, backend: Backend, end_token: str = END_OF_TEXT) -> None:
        end_of_text = backend.token_to_id(end_token)
        if end_of_text is None:
            special = [
                token.content
                for token in backend.get_added_tokens_decoder().values()
                if token.special
            ][:NAMES]
            others = f"; its special tokens are {', '.join(special)}" if special else ""
            raise BadInput(
                f"the vocabulary has no {end_token} token to end a text{others}: a recipe names"
                " another one as tokenizer.end_of_text, and `mlm-data import` takes --end-of-text"
            )
        self._backend: Any = backend
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self.end_of_text = end_of_text
        self.end_token = end_token
        kind = _kind(backend)
        self.is_byte_level, self.is_of_words = (kind == known for known in _kinds())

    is_byte_level: bool
    """True for GPT-2's kind of byte-level BPE."""
    is_of_words: bool
    """True for a vocabulary as `of_words` makes it: whole words, in order of falling frequency, and
    bytes for all other words."""

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Return the tokenizer, an object of this class, in the file `tokenizer.json` in
        `directory`. Texts end with the token that the files there name, else with `<|endoftext|>`.

        Raises BadInput if the file is missing or lacks that token, IntegrityFailure if the file is
        unreadable, its ids have gaps, or the tokenizer may make a text many times longer.
        """
        if not (directory / FILE_NAME).is_file():
            raise BadInput(
                f"there is no {FILE_NAME} in {directory}, where a dataset or a checkpoint has its"
                " tokenizer: restore it from a copy"
            )
        return cls._read(directory / FILE_NAME)

    @classmethod
    def open(cls, path: Path, end_token: str | None = None) -> Self:
        """Return the tokenizer at `path`: the directory of a dataset, a `tokenizer.json`, or a
        Hugging Face directory with one or with GPT-2's `merges.txt` and `vocab.json`. Texts end
        with `end_token`, else with the token that tokenizer_config.json or special_tokens_map.json
        beside a `tokenizer.json` names, else with `<|endoftext|>`.

        Raises BadInput for anything else, for a damaged file, and for a tokenizer that lacks the
        token that ends a text.
        """
        candidates = [path, path / "tokenizer" / FILE_NAME, path / FILE_NAME, path / "merges.txt"]
        file = next((candidate for candidate in candidates if candidate.is_file()), None)
        try:
            if file and file.name == "merges.txt":
                return cls.from_gpt2_files(
                    file.with_name("vocab.json"), file, end_token=end_token or END_OF_TEXT
                )
            if file is None or file.suffix != ".json":
                raise BadInput(
                    f"it is neither a {FILE_NAME} nor a dataset or a folder with one, or with"
                    f" merges.txt and vocab.json; transformers makes {FILE_NAME} from a"
                    " SentencePiece model: AutoTokenizer, then save_pretrained"
                )
            return cls._read(file, end_token)
        except (BadInput, IntegrityFailure) as error:
            raise BadInput(
                f"the tokenizer at {path} (tokenizer.path of a recipe, or --tokenizer) cannot be"
                f" used: {error}"
            ) from error

    @classmethod
    def _read(cls, path: Path, end_token: str | None = None) -> Self:
        """Return the tokenizer in the `tokenizer.json` at `path`. Texts end with `end_token`, else
        with the token that the files beside it name, else with `<|endoftext|>`. Raises BadInput
        without that token in the vocabulary, IntegrityFailure if the file is unreadable, its ids
        have gaps, or it may make a text many times longer."""
        try:
            content = read_bytes(path, MOST_BYTES).decode("utf-8")
            backend = _without_extras(parse_json(content)) or Backend.from_str(content)
            _check_ids(backend, path)
            if (
                backend.normalizer
                and _growth(parse_json(backend.normalizer.__getstate__())) > MOST_GROWTH
            ):
                raise IntegrityFailure(
                    f"the normalizer in {path} may make a text over {MOST_GROWTH} times longer,"
                    " which is refused: take another tokenizer"
                )
            return cls(backend, end_token or _named_end(path.parent) or END_OF_TEXT)
        except (BadInput, IntegrityFailure):
            raise
        except Exception as error:  # the library raises bare Exception
            raise IntegrityFailure(
                f"{path} is not a tokenizer that the library `tokenizers` can read, so copy it"
                f" again or take another: {error}"
            ) from error

    @classmethod
    def from_gpt2_files(
        cls, vocab_json: Path, merges_txt: Path, *, end_token: str = END_OF_TEXT
    ) -> Self:
        """Return the tokenizer of GPT-2's two files, a `vocab.json` (token to id) and a
        `merges.txt` (one merge a line, after a version line). Texts end with `end_token`, by
        default `<|endoftext|>`. Raises BadInput or IntegrityFailure if a file is missing, if they
        are not a byte-level BPE vocabulary, or if the vocabulary lacks `end_token`."""
        try:
            vocabulary = read_json(vocab_json)
            _, *lines = merges_txt.read_text(encoding="utf-8").split("\n")
            backend = _byte_level(vocabulary, (line.split(" ") for line in lines if line))
            _check_ids(backend, vocab_json)
            return cls(backend, end_token)
        except (BadInput, IntegrityFailure):
            raise
        except Exception as error:  # the library raises bare Exception
            raise BadInput(
                f"{vocab_json} and {merges_txt} are not a byte-level BPE vocabulary, as GPT-2's"
                f" are: copy both again or name others; {error}"
            ) from error

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Return a byte-level BPE tokenizer trained on the texts, with exactly `vocab_size` tokens,
        at least 257: the 256 bytes, merged pairs, and end-of-text, the last.

        The result depends only on the texts and that number. Raises BadInput if they have too few
        distinct pairs for that many tokens.
        """
        backend = _byte_level({}, [])
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        )
        heard(lambda: backend.train_from_iterator(texts, trainer))
        model = parse_json(backend.to_str())["model"]
        vocabulary: dict[str, int] = model["vocab"]
        if len(vocabulary) != vocab_size - 1:
            raise BadInput(
                f"the text is too small for a vocabulary of {vocab_size:,} (tokenizer.vocab_size):"
                f" it gives {len(vocabulary) + 1:,} tokens; lower that number, or add text"
            )
        vocabulary[END_OF_TEXT] = vocab_size - 1
        return cls(_byte_level(vocabulary, model["merges"]))

    @classmethod
    def of_words(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Return a tokenizer of `vocab_size` tokens, at least 257: end-of-text, the 256 bytes, and
        the most frequent words of the texts in order of falling frequency.

        A word is a piece of text whose ends GPT-2's byte pairs do not cross: letters, digits or
        signs, with the space before. A word outside the vocabulary is spelled in bytes, so that a
        text is restored whole. The result depends only on the texts and `vocab_size`. Raises
        BadInput if they have too few words for `vocab_size` tokens.
        """
        backend: Any = Backend(models.WordLevel(vocab={}))
        backend.pre_tokenizer = _byte_level({}, []).pre_tokenizer
        trainer: Any = trainers.WordLevelTrainer(vocab_size=vocab_size, show_progress=False)
        heard(lambda: backend.train_from_iterator(texts, trainer))
        by_rank: dict[str, int] = parse_json(backend.to_str())["model"]["vocab"]
        tokens = [END_OF_TEXT, *sorted(pre_tokenizers.ByteLevel.alphabet())]
        tokens += [word for word in by_rank if len(word) > 1]
        if len(tokens) < vocab_size:
            raise BadInput(
                f"the text is too small for a vocabulary of {vocab_size:,} (tokenizer.vocab_size):"
                f" it gives {len(tokens):,} bytes and words; lower that number, or add text"
            )
        return cls(
            _byte_level(
                {token: token_id for token_id, token in enumerate(tokens[:vocab_size])},
                [],
                of_words=True,
            )
        )

    def save(self, directory: Path) -> None:
        """Write into `directory` the files `tokenizer.json`, from which the method `load` reads the
        tokenizer, and `tokenizer_config.json`, which tells transformers which token ends a text."""
        write_text(directory / FILE_NAME, self._content)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.end_token}
        write_json(directory / CONFIG_NAME, config | {"split_special_tokens": True})

    def changes(self) -> str:
        """Encode and decode some built-in texts, CHECKED_TEXTS, and return a sentence on the first
        that does not come back as it was, with 20 characters of it and of its result; an empty text
        if all come back."""
        texts = ((text, self.decode(self.encode(text))) for text in CHECKED_TEXTS)
        return next(
            (f"{text[:20]!r} comes back as {back[:20]!r}" for text, back in texts if text != back),
            "",
        )

    def encode_ids(self, text: str) -> Integers32:
        """Return the token ids of a text as an int32 array [tokens], which may be read-only; no
        token is added, and special tokens in the text, such as `<|endoftext|>`, are encoded like
        other characters."""
        return self._encode(text) if len(text) < LONG_TEXT else heard(lambda: self._encode(text))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text as a list; no token is added, and special tokens in the
        text, such as `<|endoftext|>`, are encoded like other characters."""
        return self.encode_ids(text).tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return a list with a list of token ids for each text, in order. No token is added, and
        special tokens in a text are encoded like other characters."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, in which special tokens such as `<|endoftext|>` appear as
        they are written. Bytes that are not UTF-8 become U+FFFD; ids that no token has, such as a
        padded vocabulary's, are left out."""
        return str(self._backend.decode([int(token) for token in ids], skip_special_tokens=False))

    def text_of(self, token: int) -> str:
        """Return the text that the token with the id `token` adds to the text before it.

        WordPiece's decoding of a single token loses the space before a word; here the word begins
        with it.
        """
        if not (prefix := getattr(self._backend.model, "continuing_subword_prefix", None)):
            return self.decode([token])
        piece = str(self._backend.id_to_token(token) or "")
        return piece.removeprefix(prefix) if piece.startswith(prefix) else f" {piece}"

    @property
    def special_ids(self) -> tuple[int, ...]:
        """A tuple of the ids of [CLS], [SEP], [MASK] and [PAD], in this order: the tokenizer's own
        if it has all four, else the four ids after its last."""
        return special_ids(self._backend)

    @property
    def document_start(self) -> int:
        """Id of the token before a document: end-of-text, which also stands between documents."""
        return self.end_of_text

    @cached_property
    def vocab_size(self) -> int:
        """Number of token ids without padding: one more than the largest id of any token that the
        tokenizer has, special or not. If `special_ids` gives [CLS], [SEP], [MASK] and [PAD] the ids
        after that one, because the tokenizer lacks one of the four, these ids are not counted."""
        return max(self._backend.get_vocab().values()) + 1

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content of the `tokenizer.json` that `save` writes for this tokenizer."""
        return hashlib.sha256(self._content.encode("utf-8")).hexdigest()

    @cached_property
    def _content(self) -> str:
        return str(self._backend.to_str(pretty=True))

    @cached_property
    def _encode(self) -> Callable[[str], Integers32]:
        if not (self.is_byte_level or self.is_of_words):
            return self._reference
        return checked("byte-level BPE", self._fast, self._reference, CHECKED_TEXTS, np.array_equal)

    def _reference(self, text: str) -> Integers32:
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, np.int32)

    def _fast(self) -> Callable[[str], Integers32]:
        from fastokens import Tokenizer as Encoder

        encoder = Encoder.from_json_str(self._content)
        return lambda text: np.frombuffer(encoder.encode_batch_flat([text])[0], np.int32)


def special_ids(backend: Any) -> tuple[int, ...]:
    """Return a tuple of four ids, of [CLS], [SEP], [MASK] and [PAD] in this order, for `backend`, a
    tokenizer of the library `tokenizers`: its own if it has all four, else the four ids after its
    last; `backend` is not changed."""
    own_ids = tuple(map(backend.token_to_id, SPECIAL_TOKENS))
    size = max(backend.get_vocab().values()) + 1
    return tuple(range(size, size + len(SPECIAL_TOKENS))) if None in own_ids else own_ids


@lru_cache(maxsize=2)
def load_once(directory: Path, digest: str) -> Tokenizer:
    """Return the tokenizer in the `tokenizer.json` of `directory`, which is read once; the two last
    tokenizers are cached in the process, and callers share them. `digest` tells contents of one
    directory apart in the cache; the file is not compared with it. Raises the errors of
    `Tokenizer.load`: BadInput if it is missing or lacks its end-of-text token, IntegrityFailure if
    it is unreadable or refused."""
    return Tokenizer.load(directory)


def _named_end(directory: Path) -> str | None:
    """Return the text of the end-of-text token that tokenizer_config.json in `directory` names, or
    else special_tokens_map.json there; None if neither names one. Raises the errors of `read_json`,
    and others for JSON of another form."""
    for name in (CONFIG_NAME, "special_tokens_map.json"):
        if (directory / name).is_file() and (token := read_json(directory / name).get("eos_token")):
            return str(token["content"] if isinstance(token, dict) else token)
    return None


def _without_extras(content: JSON) -> Backend | None:
    """Return the tokenizer of `content`, the values of a tokenizer.json, as a Tokenizer of the
    library `tokenizers` that is rebuilt from vocabulary, added tokens and merges alone, so that
    other settings, such as a post-processor, do not keep it from counting as GPT-2's kind. Return
    None if a setting could change ids: a normalizer, another cutting of words than GPT-2's, another
    model than BPE, one of OTHER_IDS, or an added token that is not special."""
    model = content["model"]
    before = content.get("pre_tokenizer") or {}
    added = content.get("added_tokens") or []
    cuts = (
        before.get("type") == "ByteLevel"
        and before.get("use_regex", True)
        and not before.get("add_prefix_space", 1)
    )
    others = (
        content.get("normalizer"),
        model.get("type", "BPE") != "BPE",
        *map(model.get, OTHER_IDS),
    )
    if not cuts or any(others) or not all(token.get("special", True) for token in added):
        return None
    vocabulary = model["vocab"] | {token["content"]: token["id"] for token in added}
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    return _byte_level(vocabulary, pairs)


def _check_ids(backend: Backend, path: Path) -> None:
    """Raise IntegrityFailure, which names the file `path`, if an id of the tokenizer `backend`
    occurs twice, or if the ids of a tokenizer of GPT-2's kind have gaps. Tokenizers of other kinds
    may lack at most as many ids as they have."""
    ids = sorted(backend.get_vocab().values())
    count = len(ids)
    size = ids[-1] + 1
    # The library's serialization takes memory for every id up to the last, however few there are.
    if len({*ids}) < count or size > 2 * count or (size > count and _kind(backend) in _kinds()):
        raise IntegrityFailure(
            f"{path}: the ids of its {len(ids)} tokens have gaps, or one id belongs to two tokens;"
            " take another tokenizer"
        )


def _growth(step: JSON) -> int:
    """Return roughly by what factor a normalizer may lengthen a text, not a bound: for each of its
    steps the number of characters that the step puts in place of a match or before the text, at
    least 1, all multiplied. Other steps, such as NFKD, count as 1, though they may lengthen a text
    too. `step` is the normalizer as JSON, which may contain others."""
    factor = max(1, len(step.get("content", "")), len(step.get("prepend", "")))
    return factor * math.prod(map(_growth, step.get("normalizers", [])))


def _kind(backend: Any) -> tuple[Any, ...]:
    """Return all settings and the added tokens of a tokenizer of the library `tokenizers`, without
    its vocabulary and merges, as a tuple that equals another tokenizer's if they are of the same
    kind. The tuple has lists in it and cannot be hashed."""
    # Compared part by part: serializing the whole tokenizer doubled the time to open GPT-2's.
    steps = backend.normalizer, backend.pre_tokenizer, backend.post_processor, backend.decoder
    model = [getattr(backend.model, name, None) for name in (*OTHER_IDS, "unk_token", "fuse_unk")]
    after = backend.get_added_tokens_decoder(), backend.truncation, backend.padding
    return type(backend.model), model, [step and step.__getstate__() for step in steps], after


def _byte_level(
    vocabulary: dict[str, int], merges: Iterable[Sequence[str]], *, of_words: bool = False
) -> Backend:
    pairs = [(left, right) for left, right in merges]
    backend: Any = Backend(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=of_words))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    return backend


@cache
def _kinds() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return a pair of kinds of tokenizers, each a tuple of everything in a tokenizer but its
    vocabulary, as `_kind` returns it: of GPT-2's byte-level BPE, and of a vocabulary of words."""
    return _kind(_byte_level({}, [])), _kind(_byte_level({}, [], of_words=True))
