"""Near-duplicates beside the libraries that find them: what each drops of the same documents, in which time and memory.

The documents are made of a corpus' sentences, and a tenth of them are edited copies of earlier ones, whose exact
Jaccard similarity says who is right. Each contender works on one core, in a process of its own.
"""

import os
import random
import re
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from data_pipeline.config import DeduplicateConfig
from data_pipeline.duplicates.components import components
from data_pipeline.duplicates.lsh import fingerprints
from data_pipeline.fast.shingles import jaccard, shingles
from experiments.bench.data_chain import size_bytes, verification
from experiments.bench.data_whole import OURS
from experiments.bench.stage import in_new_process
from experiments.bench.timing import NOTES, cpu_seconds, load_average, ratio, series
from lineage.benchmark import Benchmark, Case
from lineage.errors import BadInput, UserError
from lineage.extras import import_extra, install_command
from lineage.progress import Progress, announce

SEED, LIMIT_SECONDS = 1234, 1800.0
LEAST_SENTENCES = 500
SENTENCES = (5, 12)
"""Least and most sentences of a document that is no copy."""
COPY_EVERY = 10
LARGEST_EDIT = 0.15
"""A copy has up to this share of its words exchanged for others."""
MARGIN = 0.1
"""Above the threshold by this much, a pair must be found: by chance, 25 bands of 5 rows miss one in 20,000."""
UNABLE = {
    "fastdedup": "it is not on PyPI; its author's figure is 14.9 million documents in 3.4 core-hours",
    "text-dedup": "its package, which its author retires, cannot be installed beside ours: it wants urllib3 ≤ 2.0",
}
"""Programs that are not measured, and why."""

Drop = Callable[[Sequence[str], DeduplicateConfig], set[int]]
"""Numbers of the documents that go, for texts in their order."""


class Documents(NamedTuple):
    """What is deduplicated."""

    texts: list[str]
    originals: dict[int, int]
    """The earlier document of which each copy is one."""


class Taken(NamedTuple):
    """What a contender needed, and what it dropped."""

    seconds: float
    peak_bytes: int
    dropped: set[int]


def _ours(texts: Sequence[str], config: DeduplicateConfig) -> set[int]:
    of_texts = fingerprints(texts, config)
    bands = (np.ascontiguousarray(of_texts[:, band]) for band in range(config.bands))
    labels = components(bands, np.ascontiguousarray(of_texts[:, config.bands :]), config)
    return {document for document, _ in verification(config).ours(texts, of_texts, labels)}


def _datasketch(texts: Sequence[str], config: DeduplicateConfig) -> set[int]:
    from datasketch import MinHash, MinHashLSH

    index, kept, gone = MinHashLSH(threshold=config.threshold, num_perm=128), dict[int, MinHash](), set[int]()
    for number, text in enumerate(texts):
        minhash = MinHash(num_perm=128)
        minhash.update_batch([each.encode() for each in shingles(text, config.shingle_characters)])
        if any(kept[other].jaccard(minhash) >= config.threshold for other in index.query(minhash)):
            gone.add(number)
        else:
            index.insert(number, minhash, check_duplication=False)
            kept[number] = minhash
    return gone


def _rensa(texts: Sequence[str], config: DeduplicateConfig) -> set[int]:
    index = import_extra("rensa", "bench").RMinHashDeduplicator(config.threshold, 128, use_lsh=True)
    pairs = ((str(number), list(shingles(text, config.shingle_characters))) for number, text in enumerate(texts))
    return {number for number, keep in enumerate(index.add_pairs(pairs)) if not keep}


def _rensa_rho(texts: Sequence[str], config: DeduplicateConfig) -> set[int]:
    rensa = import_extra("rensa", "bench")
    matrix = rensa.RMinHash.digest_matrix_from_token_sets_rho(map(str.split, texts), 128, SEED)
    flags = rensa.RMinHashLSH(config.threshold, 128, 8).query_duplicate_flags_matrix_one_shot(matrix)
    return {number for number, is_duplicate in enumerate(flags) if is_duplicate}


CONTENDERS: dict[str, Drop] = {
    OURS: _ours,
    "datasketch": _datasketch,
    "rensa": _rensa,
    "rensa, rho on words": _rensa_rho,
}


def measure_near_duplicates(corpus: Sequence[str], count: int, setting: dict[str, Any]) -> Benchmark:
    """So many documents, each contender once. Ours is wrong where it leaves a pair well above the threshold, or drops
    a document that is like no other.

    Raises BadInput for a corpus of too few sentences, and UserError where ours fails.
    """
    config = DeduplicateConfig()
    texts, originals = make_documents(corpus, count)
    similar = {copy: jaccard(*(shingles(texts[each], config.shingle_characters) for each in (original, copy)))
               for copy, original in originals.items()}  # fmt: skip
    missing = UNABLE | {name: f"not installed: {install_command('bench')}"
                        for name in CONTENDERS if name.startswith("rensa") and find_spec("rensa") is None}  # fmt: skip
    present = [name for name in CONTENDERS if name not in missing]
    megabytes = size_bytes(texts) / 1e6
    announce(
        f"{len(present)} contenders on {count:,} documents of {megabytes:.1f} MB, of which {len(similar):,} are copies"
    )
    taken, load = dict[str, Taken](), [load_average()]
    with Progress("near-duplicates", len(present), "contenders") as progress:
        for name in present:
            try:
                taken[name] = in_new_process(LIMIT_SECONDS, run_contender, name, corpus, count)
            except UserError as error:
                missing[name] = str(error)
            load.append(load_average())
            progress.advance(1, name)
    if OURS not in taken:
        raise UserError(f"ours failed: {missing[OURS]}")
    alike = {copy for copy, value in similar.items() if value >= config.threshold}
    paired = alike | {originals[copy] for copy in alike}
    plain = {copy for copy, value in similar.items() if value >= config.threshold + MARGIN}
    ours = taken[OURS].dropped
    wrong = {
        f"pairs of at least {config.threshold + MARGIN:g} left": len(plain - ours),
        "documents dropped that are like no other": len(ours - paired),
    }
    return Benchmark(
        benchmark="data-near-duplicates",
        title="Near-duplicates: who is fast, and who finds them",
        cases=[
            Case(
                name=f"{count:,} documents",
                series=[
                    measured
                    for name, (seconds, peak, dropped) in taken.items()
                    for measured in (
                        series(name, "time", "processor s", seconds),
                        series(name, "throughput", "MB/s", megabytes / seconds),
                        series(name, "peak memory", "bytes", peak),
                        series(name, "of the near-duplicates, dropped", "", len(alike & dropped) / max(1, len(alike))),
                        series(name, f"pairs of at least {config.threshold + MARGIN:g} left", "", len(plain - dropped)),
                        series(name, "documents dropped that are like no other", "", len(dropped - paired)),
                    )
                ],
                ratios=[
                    ratio(f"{name}, time of a near-duplicate dropped ÷ that of ours",
                          [seconds / max(1, len(alike & dropped))],
                          [taken[OURS].seconds / max(1, len(alike & ours))], goal=1)
                    for name, (seconds, _, dropped) in taken.items() if name != OURS
                ],
                missing=missing,
                setting={"copies": len(similar), "near-duplicates": len(alike), "megabytes": round(megabytes, 3)},
            )
        ],
        disagreements=[f"ours: {found} {what}" for what, found in wrong.items() if found],
        notes=NOTES["data-near-duplicates"],
        setting=setting | {"versions": {name: version(name) for name in ("datasketch", "rensa") if name in taken}},
        load_average=load,
    )  # fmt: skip


def run_contender(name: str, corpus: Sequence[str], count: int) -> Taken:
    """On one core, after a run on two documents in which tables are loaded and code is compiled."""
    import torch

    from engine.guard.memory import PeakMemory

    os.environ["RAYON_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    texts, drop, config = make_documents(corpus, count).texts, CONTENDERS[name], DeduplicateConfig()
    drop(texts[:2], config)
    memory = PeakMemory(torch.device("cpu"))
    seconds, dropped = cpu_seconds(drop, texts, config)
    return Taken(seconds, memory.bytes(), dropped)


def make_documents(corpus: Sequence[str], count: int) -> Documents:
    """Documents of a corpus' sentences, drawn at random; every tenth is a copy of an earlier one with some words
    exchanged. Raises BadInput for a corpus of too few sentences.
    """
    sentences = sorted({part for text in corpus for part in re.split(r"(?<=[.!?])\s+", text) if 40 <= len(part) <= 400})
    if len(sentences) < LEAST_SENTENCES:
        raise BadInput(f"the corpus has {len(sentences)} sentences of 40 to 400 characters, too few to make one of")
    chance = random.Random(SEED)
    words = [word for sentence in chance.sample(sentences, LEAST_SENTENCES) for word in sentence.split()]
    texts, copied, originals = list[str](), set[int](), dict[int, int]()
    for number in range(count):
        if number % COPY_EVERY < COPY_EVERY - 1:
            texts.append(" ".join(chance.choices(sentences, k=chance.randint(*SENTENCES))))
            continue
        original = (
            number - 1 - chance.randrange(COPY_EVERY - 1) - COPY_EVERY * chance.randrange(1 + number // COPY_EVERY)
        )
        if original in copied:
            original = number - 1
        copied.add(original)
        originals[number] = original
        share = chance.uniform(0, LARGEST_EDIT)
        edited = (chance.choice(words) if chance.random() < share else word for word in texts[original].split())
        texts.append(" ".join(edited))
    return Documents(texts, originals)
