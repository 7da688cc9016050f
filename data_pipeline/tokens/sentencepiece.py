"""SentencePiece models as tokenizers of Hugging Face's library, with the same ids (github.com/google/sentencepiece).

A model file is a protocol buffer, sentencepiece_model.proto. Of it are read the pieces, and of the specifications of
trainer and normalizer what encoding depends on. The text of a control or byte piece, such as `</s>`, is no such piece:
in a unigram model, which would find it, the name of a control piece begins with a space, which no normalized text has.

A model that normalizes characters (all but `identity`) keeps its ids on texts whose characters each stand alone: where
several make one grapheme, as a letter with a combining mark or "\\r\\n" do, the library may normalize differently.
"""

import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mlm_repro.lineage.atomic import read_bytes
from mlm_repro.lineage.errors import BadInput

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)
UNIGRAM, BPE = 1, 2
SPACE = "\u2581"
MOST_BYTES = 64 << 20


def read_sentencepiece(path: Path, end_token: str | None = None) -> tuple[Tokenizer, str]:
    """The tokenizer, and its token for `end_token` or else for the model's own end of a text, "" if there is none.

    Raises BadInput for a file that cannot be read, and for a model whose ids the library cannot give.
    """
    try:
        return _build(read_bytes(path, MOST_BYTES), end_token)
    except Exception as error:  # the library raises bare Exception
        raise BadInput(f"{path} is not a readable SentencePiece model: {error}") from error


def _build(content: bytes, end_token: str | None) -> tuple[Tokenizer, str]:
    model = _fields(content)
    read = [_fields(piece) for piece in model[1]]
    pieces = [(each[1][-1].decode(), each[2][-1] if 2 in each else 0.0, each.get(3, [NORMAL])[-1]) for each in read]
    trainer, spec = (_fields(model[number][-1]) if number in model else {} for number in (2, 3))
    kind, of_bytes = trainer.get(3, [UNIGRAM])[-1], bool(trainer.get(35, [0])[-1])
    if kind not in (UNIGRAM, BPE) or trainer.get(24, [0])[-1] or not spec.get(5, [1])[-1]:
        raise ValueError("it is of whole words or characters, or marks spaces behind words or not at all")
    if kind == UNIGRAM and of_bytes:
        raise ValueError("it is a unigram model with byte fallback, in which a text such as <0x41> would be a byte")
    if any(kind in (USER_DEFINED, UNUSED) for _, _, kind in pieces):
        raise ValueError("it has unused pieces or symbols that its user defined; name its tokenizer.json instead")
    end = trainer.get(42, [2])[-1]
    ends = end_token or (pieces[end][0] if end < len(pieces) and pieces[end][2] == CONTROL else "")
    if kind == UNIGRAM:
        pieces = [(piece if kind == NORMAL else f" {piece}", score, kind) for piece, score, kind in pieces]
        ends = ends and f" {ends}"
    unknown = next(number for number, piece in enumerate(pieces) if piece[2] == UNKNOWN)
    backend: Any = Tokenizer(_bpe(pieces, unknown, of_bytes) if kind == BPE else _unigram(pieces, unknown))
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
    return backend, ends


def _unigram(pieces: list[tuple[str, float, int]], unknown: int) -> Any:
    """The library counts the lowest score of all pieces, SentencePiece that of normal ones, for what is unknown."""
    lowest = min((score for _, score, kind in pieces if kind == NORMAL), default=0.0)
    return models.Unigram([(piece, score if kind == NORMAL else lowest) for piece, score, kind in pieces], unknown)


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
    mapped: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    before: list[Any] = [normalizers.Prepend(SPACE)] if adds_space else []
    if removes_spaces:
        ends, doubled = (Regex(rf"\A +|[ {SPACE}]+\z"), ""), (Regex(" {2,}"), " ")
        steps = [*mapped, normalizers.Replace(*ends), normalizers.Replace(*doubled), *before]
    else:  # a text of nothing but characters that the map removes has the space
        steps = before + mapped
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
            if place > len(data):
                raise ValueError("it ends too early")
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
