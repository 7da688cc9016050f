"""Byte-level BPE beside every encoder that takes a vocabulary from a file: how fast, and whether the ids are those of
Hugging Face tokenizers, text by text. Each encoder works in a process of its own.
"""

import hashlib
import os
import random
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from data_pipeline.tokens.tokenizer import FILE_NAME, Tokenizer
from experiments.bench.stage import in_new_process
from experiments.bench.timing import NOTES, load_average, ratio, series
from lineage.atomic import read_json
from lineage.benchmark import Benchmark, Case
from lineage.errors import UserError
from lineage.extras import import_extra, install_command
from lineage.progress import Progress, announce

REFERENCE, OURS = "tokenizers", "fastokens"
THROUGHPUT, OTHER_IDS = "throughput", "texts with other ids"
LIMIT_SECONDS, SEED, SAMPLE_CHARACTERS, LONGEST = 600.0, 1234, 2_000_000, 5_000
ALPHABETS = (
    "abZ' ", " \t\n\r\u00a0\u3000", "'stremdlv", "0179½٣Ⅷ", ".,!?-—“”()#$", "éßñ\u0301ščω", "яжДЩ", "漢字かな한",
    "हिन्दीไทย", "🙂👩\u200d👧\U0001f1e9", "\x00\x1b\x7f\u2028\ufeff",
)  # fmt: skip
"""What strings are drawn from at random, beside all of Unicode."""
UNABLE = {
    "bpe-openai": "it downloads OpenAI's vocabularies and takes no other",
    "quicktok": "it encodes with what it has trained itself",
    "rs-bpe": "it has cl100k and o200k alone",
    "wordchipper": "it downloads OpenAI's vocabularies and takes no other",
}
"""Encoders that cannot be given a vocabulary, and why."""
GPT2_EXPRESSION = r"""'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

Ids = Iterable[Iterable[int]]
Encode = Callable[[list[str]], Ids]


def _tokenizers(path: Path, cores: int) -> Encode:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(path))
    return lambda texts: [each.ids for each in backend.encode_batch(texts, add_special_tokens=False)]


def _fastokens(path: Path, cores: int) -> Encode:
    import numpy as np
    from fastokens import Tokenizer as Backend

    backend = Backend.from_json_str(path.read_text(encoding="utf-8"))

    def encode(texts: list[str]) -> Ids:
        ids, bounds = (np.frombuffer(part, kind) for part, kind in
                       zip(backend.encode_batch_flat(texts), (np.uint32, np.uint64), strict=True))  # fmt: skip
        return [ids[start:end] for start, end in pairwise(bounds.tolist())]

    return encode


def _tiktoken(path: Path, cores: int) -> Encode:
    tiktoken = import_extra("tiktoken", "bench-bpe")
    shown = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
    hidden = [byte for byte in range(256) if byte not in shown]
    bytes_of = {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
    vocabulary = read_json(path)["model"]["vocab"]
    ranks = {bytes(bytes_of[letter] for letter in token): rank for token, rank in vocabulary.items()}
    encoding = tiktoken.Encoding("file", pat_str=GPT2_EXPRESSION, mergeable_ranks=ranks, special_tokens={})
    return lambda texts: encoding.encode_ordinary_batch(texts, num_threads=cores)


def _gigatoken(path: Path, cores: int) -> Encode:
    encode: Encode = import_extra("gigatoken", "bench-bpe").Tokenizer(path).encode_batch
    return encode


def _tokie(path: Path, cores: int) -> Encode:
    backend = import_extra("tokie", "bench-bpe").Tokenizer.from_json(str(path))
    return lambda texts: [each.ids for each in backend.encode_batch(texts, add_special_tokens=False)]


ENCODERS: dict[str, Callable[[Path, int], Encode]] = {
    REFERENCE: _tokenizers, OURS: _fastokens, "tiktoken": _tiktoken, "gigatoken": _gigatoken, "tokie": _tokie
}  # fmt: skip


def run_encoder(name: str, vocabulary: Path, texts: list[str], cores: int) -> tuple[float, list[bytes]]:
    """Seconds in which an encoder with so many threads encodes the texts, and a digest of each's ids.

    On one core they are the processor's, on several the clock's.
    """
    os.environ |= {"RAYON_NUM_THREADS": str(cores), "TOKENIZERS_PARALLELISM": str(cores > 1).lower()}
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    encode = ENCODERS[name](vocabulary, cores)
    encode(texts[:1])
    clock = time.process_time if cores == 1 else time.perf_counter
    start = clock()
    ids = encode(texts)
    seconds = clock() - start
    return seconds, [hashlib.md5(",".join(map(str, each)).encode()).digest()[:8] for each in ids]


def measure_encoders(texts: Sequence[str], vocabulary: Tokenizer, fuzzed: int, setting: dict[str, Any]) -> Benchmark:
    """English, code and random Unicode on one core and on two, then so many strings that are made to differ.

    Only ours is said to disagree: what the others do is the table.
    """
    chance, stdlib = random.Random(SEED), Path(sysconfig.get_path("stdlib"))
    kinds = {
        "English": cut(texts),
        "code": cut(path.read_text("utf-8", "replace") for path in sorted(stdlib.glob("*.py"))),
        "random Unicode": cut(random_string(chance, LONGEST) for _ in range(SAMPLE_CHARACTERS // LONGEST)),
    }  # fmt: skip
    work = {(kind, cores): of_kind for kind, of_kind in kinds.items() for cores in (1, 2)}
    work["fuzzed strings", 1] = [random_string(chance, chance.randrange(40)) for _ in range(fuzzed)]
    missing = UNABLE | {name: f"not installed: {install_command('bench-bpe')}"
                        for name in ENCODERS if find_spec(name) is None}  # fmt: skip
    present = [name for name in ENCODERS if name not in missing]
    announce(f"{len(present)} encoders on {len(work)} sets of texts")
    cases, wrong, load = [], [], [load_average()]
    with TemporaryDirectory() as folder, Progress("encoding", len(present) * len(work), "measurements") as progress:
        vocabulary.save(Path(folder))
        for (kind, cores), of_kind in work.items():
            case, differing = compare_encoders(kind, cores, of_kind, present, Path(folder) / FILE_NAME, progress)
            cases.append(case)
            load.append(load_average())
            wrong += [f"{case.name}: {differing} ids of ours differ"] if differing else []
    set_goals(cases)
    versions = {name: version(name) for name in present}
    return Benchmark(
        benchmark="data-encoding",
        title="Byte-level BPE: who is fast, and who is exact",
        cases=[*cases, Case(name="not measured", missing=missing)],
        disagreements=wrong,
        notes=NOTES["data-encoding"],
        setting=setting | {"versions": versions},
        load_average=load,
    )


def compare_encoders(
    kind: str, cores: int, texts: list[str], present: Sequence[str], vocabulary: Path, progress: Progress,
) -> tuple[Case, int]:  # fmt: skip
    """What every encoder took, and how many texts it gave other ids than tokenizers; that of ours."""
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    seconds, answers, failed = dict[str, float](), dict[str, list[bytes]](), dict[str, str]()
    for name in present:
        try:
            seconds[name], answers[name] = in_new_process(LIMIT_SECONDS, run_encoder, name, vocabulary, texts, cores)
        except UserError as error:
            failed[name] = str(error)
        progress.advance(1, name)
    differing = {
        name: sum(a != b for a, b in zip(mine, answers[REFERENCE], strict=True)) for name, mine in answers.items()
    }
    case = Case(
        name=f"{kind}, {cores} core{'s' * (cores > 1)}",
        series=[
            *(series(name, THROUGHPUT, "MB/s", megabytes / spent) for name, spent in seconds.items()),
            *(series(name, OTHER_IDS, "", count) for name, count in differing.items()),
        ],
        ratios=[ratio(f"{name}, × tokenizers", [seconds[REFERENCE]], [spent])
                for name, spent in seconds.items() if name != REFERENCE],
        missing=failed,
        setting={"texts": len(texts), "megabytes": round(megabytes, 3)},
    )  # fmt: skip
    return case, differing.get(OURS, 0)


def set_goals(cases: Sequence[Case]) -> None:
    """Add to each case how ours does beside the fastest of the others whose ids are right in every case."""
    samples = [{(one.measure, one.contender): one.samples[0] for one in case.series} for case in cases]
    exact = {name for name in ENCODERS if not any(each.get((OTHER_IDS, name), 1) for each in samples)}
    for case, each in zip(cases, samples, strict=True):
        if rivals := [rate for (measure, name), rate in each.items()
                      if measure == THROUGHPUT and name in exact - {OURS}]:  # fmt: skip
            case.ratios.append(
                ratio("ours, × the fastest other exact one", [each.get((THROUGHPUT, OURS), 0)], [max(rivals)], goal=1)
            )


def cut(texts: Iterable[str]) -> list[str]:
    """The beginning of the texts, SAMPLE_CHARACTERS of it, in parts of at most LONGEST characters."""
    parts, left = list[str](), SAMPLE_CHARACTERS
    for text in texts:
        for start in range(0, min(len(text), left), LONGEST):
            parts.append(text[start : start + LONGEST])
        left -= len(text)
        if left <= 0:
            break
    return parts


def random_string(chance: random.Random, length: int) -> str:
    """So many characters in short runs of one alphabet each, every fourth of which is all of Unicode."""
    text = ""
    while len(text) < length:
        run = chance.randint(1, 6)
        if chance.randrange(4):
            text += "".join(chance.choices(chance.choice(ALPHABETS), k=run))
        else:
            text += "".join(map(chr, chance.choices(range(0xD800), k=run)))
            text += chr(chance.randrange(0xE000, 0x110000))
    return text[:length]
