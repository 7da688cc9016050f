"""SentencePiece models as tokenizers of Hugging Face's library, with the same ids (github.com/google/sentencepiece).

A model file is a protocol buffer, sentencepiece_model.proto. Of it are read the pieces, and of the specifications of
trainer and normalizer what encoding depends on. The text of a control or byte piece, such as `</s>`, is no such piece.
"""

import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lineage.atomic import read_bytes
from lineage.errors import BadInput

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
UNIGRAM, BPE = 1, 2
SPACE = "\u2581"
MOST_BYTES = 64 << 20


def read_sentencepiece(path: Path) -> tuple[Tokenizer, str]:
    """The tokenizer, and the token that ends a text, "" if there is none.

    Raises BadInput for a file that cannot be read, and for a model of whole words or characters.
    """
    try:
        return _build(read_bytes(path, MOST_BYTES))
    except (OSError, ValueError, IndexError, KeyError, TypeError, struct.error) as error:
        raise BadInput(f"{path} is not a readable SentencePiece model: {error}") from error


def _build(content: bytes) -> tuple[Tokenizer, str]:
    model = _fields(content)
    read = [_fields(piece) for piece in model[1]]
    pieces = [(each[1][-1].decode(), each[2][-1] if 2 in each else 0.0, each.get(3, [NORMAL])[-1]) for each in read]
    trainer, spec = (_fields(model[number][-1]) if number in model else {} for number in (2, 3))
    kind, of_bytes = trainer.get(3, [UNIGRAM])[-1], bool(trainer.get(35, [0])[-1])
    if kind not in (UNIGRAM, BPE) or trainer.get(24, [0])[-1]:
        raise ValueError("it is of whole words or characters, or marks spaces behind words")
    if any(kind == USER_DEFINED for _, _, kind in pieces):
        raise ValueError("it has symbols that its user defined; name its tokenizer.json instead")
    unknown = next(number for number, piece in enumerate(pieces) if piece[2] == UNKNOWN)
    backend: Any = Tokenizer(_bpe(pieces, unknown, of_bytes) if kind == BPE else _unigram(pieces, unknown, of_bytes))
    adds_space = bool(spec.get(3, [1])[-1])
    backend.normalizer = _normalizer(spec.get(2, [b""])[-1], adds_space, bool(spec.get(4, [1])[-1]))
    if not any(SPACE in piece[1:] for piece, _, _ in pieces):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    special = [piece for piece, _, kind in pieces if kind in (UNKNOWN, CONTROL)]
    backend.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    end = trainer.get(42, [2])[-1]
    return backend, pieces[end][0] if end < len(pieces) and pieces[end][2] == CONTROL else ""


def _unigram(pieces: list[tuple[str, float, int]], unknown: int, of_bytes: bool) -> Any:
    never = 100 * min((score for _, score, kind in pieces if kind == NORMAL), default=-1.0)
    scores = [(piece, score if kind == NORMAL else never) for piece, score, kind in pieces]
    return models.Unigram(scores, unknown, of_bytes)


def _bpe(pieces: list[tuple[str, float, int]], unknown: int, of_bytes: bool) -> Any:
    scores = {piece: score for piece, score, kind in pieces if kind == NORMAL}
    merges = [
        (score, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    merges.sort(key=lambda merge: -merge[0])
    vocabulary = {piece: number for number, (piece, _, _) in enumerate(pieces)}
    pairs = [(left, right) for _, left, right in merges]
    return models.BPE(vocabulary, pairs, unk_token=pieces[unknown][0], fuse_unk=True, byte_fallback=of_bytes)


def _normalizer(charsmap: bytes, adds_space: bool, removes_spaces: bool) -> Any:
    steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if removes_spaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend(SPACE)] if adds_space else []
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _fields(data: bytes) -> dict[int, list[Any]]:
    """Values of each field of a protocol buffer, in order."""
    values, place = defaultdict[int, list[Any]](list), 0
    while place < len(data):
        value: Any
        key, place = _varint(data, place)
        if key & 7 == 0:
            value, place = _varint(data, place)
        elif key & 7 == 2:
            size, place = _varint(data, place)
            value, place = data[place : place + size], place + size
        elif key & 7 == 5:
            value, place = struct.unpack_from("<f", data, place)[0], place + 4
        else:
            raise ValueError(f"a field of type {key & 7}")
        values[key >> 3].append(value)
    return values


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
        if byte < 128:
            return value, place
