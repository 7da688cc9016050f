"""The data pipeline on one core, stage by stage beside the plain libraries, and as a whole beside these together."""

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from data_pipeline.reading.pieces import SHARD_BYTES
from experiments.bench import data_whole as whole
from experiments.bench.data_whole import FASTER, HOURS, OURS, PLAIN, SECONDS
from experiments.bench.timing import NOTES, ratio, series
from lineage.benchmark import Benchmark, Case
from lineage.digest import sha256_file
from lineage.errors import DataMissing, UserError
from lineage.progress import announce

SHARDS = f"shard_bytes = {SHARD_BYTES}"
"""As of the paper's corpus; of a small one shards are smaller, which costs more a byte."""


def measure(
    corpus: Annotated[Path, typer.Option("--corpus", help="A .jsonl file with a string `text` on every line.")],
    rounds: Annotated[int, typer.Option(min=1, help="How often the whole pipeline is run.")] = 3,
) -> Benchmark:
    """The data pipeline on one core, stage by stage beside the plain libraries, and whole beside these together.

    Every answer is compared. Takes about seven seconds for each megabyte. Ends with code 3 if any answer differs.
    """
    from data_pipeline.config import DataConfig, SourcesConfig
    from data_pipeline.contamination.testsets import find_test_set
    from experiments.bench.data_chain import choose_vocabulary, measure_stages, size_bytes

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    texts, malformed = whole.read_texts(corpus)
    described = {"name": corpus.name, "sha256": sha256_file(corpus), "documents": len(texts), "malformed": malformed}
    megabytes = size_bytes(texts) / 1e6
    announce(f"{megabytes:.1f} MB in {len(texts):,} documents, every stage by plain libraries and by ours")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "tokenizer").mkdir()
        vocabulary = choose_vocabulary(texts)
        vocabulary.tokenizer.save(work / "tokenizer")
        test_sets = []
        for name in ("wikitext103", "lambada"):
            with suppress(DataMissing):
                test_sets.append(find_test_set(name))
        config = DataConfig(name="bench", sources=SourcesConfig(names=(f"jsonl:{corpus}",)))
        base_texts = whole.base_of(texts)
        base = whole.write_texts(work / "base.jsonl", base_texts)
        with suppress(UserError):  # of too small a corpus the stages say which leaves too little
            whole.run_pipeline(base, vocabulary.recipe_of_few, work)  # machine code is compiled and kept
        stages, expected = measure_stages(texts, work / "tokenizer", tuple(test_sets), config)
        runs = []
        for _ in range(rounds):
            of_base, _ = whole.run_pipeline(base, vocabulary.recipe_of_few, work, settings=SHARDS)
            of_all, dataset = whole.run_pipeline(corpus, vocabulary.recipe, work, settings=SHARDS)
            runs.append((of_all.cpu_seconds, of_base.cpu_seconds))
        left = whole.texts_of(dataset)
        differing = ((expected - left) + (left - expected)).total()
    plain = sum(_seconds(case, PLAIN) for case in stages)
    cases = [*stages, whole_case(plain, runs, megabytes, size_bytes(base_texts) / 1e6, left.total(), differing)]
    wrong = {case.name: one.samples[0] for case in cases for one in case.series if one.contender == "differing"}
    return Benchmark(
        benchmark="data",
        title="Data pipeline beside the libraries it replaces",
        cases=cases,
        disagreements=[f"{name}: {count} answers differ" for name, count in wrong.items() if count],
        notes=NOTES["data"],
        setting={
            "corpus": described | {"megabytes": round(megabytes, 3)},
            "vocabulary": vocabulary.description,
        },
    )  # fmt: skip


def whole_case(
    plain: float, runs: Sequence[tuple[float, float]], megabytes: float, base_megabytes: float, documents: int,
    differing: int,
) -> Case:  # fmt: skip
    """The pipeline beside the plain chain, by the seconds of its runs on the corpus and on the base.

    It has no rates where the documents beyond the base cost little.
    """
    beyond = [whole.beyond_starting(of_all, of_base) for of_all, of_base in runs]
    own = [] if None in beyond else [each * megabytes / (megabytes - base_megabytes) for each in beyond if each]
    rates = {
        ("throughput", "MB/s"): [megabytes / each for each in own],
        (HOURS, "core-hours"): [whole.core_hours(each, megabytes) for each in own],
    }
    return Case(
        name="whole beside the plain stages together",
        series=[
            series(OURS, "time", SECONDS, *(of_all for of_all, _ in runs)),
            series(PLAIN, "time", SECONDS, plain),
            series("base", "time", SECONDS, *(of_base for _, of_base in runs)),
            *(series(OURS, *what, *samples) for what, samples in rates.items() if samples),
            *whole.answers(documents, differing),
        ],
        ratios=[ratio(FASTER, [plain] * len(own), own, 20)] if own else [],
        missing={} if own else {OURS: "the corpus is too small: it costs hardly more than a fifth of it"},
    )


def _seconds(case: Case, contender: str) -> float:
    return median(
        next(series.samples for series in case.series if (series.contender, series.measure) == (contender, "time"))
    )
