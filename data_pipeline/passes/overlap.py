"""The 8-gram overlap of the GPT-2 and Megatron-LM papers: which share of a test set a training
corpus contains.

Radford et al. 2019, section 4, give the percentage of a data set's 8-grams that the training set
also contains. Words are lower-cased and alphanumeric. Shoeybi et al. 2019 give it in the same way
for their corpus: at most 10.8 % of WikiText-103's test set and at most 1.4 % of LAMBADA's. The
papers query Bloom filters of the training set. This keeps the test set's n-grams and reads the
training set, in shards and on any number of machines, and is exact.

Neither paper says whether an n-gram that the test set has twice counts twice. Here it does; the
share of distinct n-grams stands beside it. N-grams of the test set do not run across lines, nor
across `<unk>`, in the test set or in WikiText's own training text.
"""

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.data_pipeline.contamination.decontaminate import (
    UNKNOWN_WORD,
    ngrams_of_files,
    read_documents,
)
from mlm_repro.data_pipeline.contamination.words import runs_of, words_of
from mlm_repro.data_pipeline.document import Document
from mlm_repro.data_pipeline.reading.pieces import choose_shard_bytes
from mlm_repro.data_pipeline.reading.readers import check_damaged, read_sound
from mlm_repro.data_pipeline.reading.sources import OpenedSources
from mlm_repro.data_pipeline.work.tasks import Counts, Settings
from mlm_repro.data_pipeline.work.workspace import Job, Workspace
from mlm_repro.lineage.atomic import JSON, write_json
from mlm_repro.lineage.errors import BadInput

FOUND = "found.txt"
RESULT = "overlap.json"


def count_overlap(texts: Iterable[str], test_set: Path, words: int) -> tuple[int, set[str]]:
    """Return a pair: the number of texts in `texts`, which is read once, and the set of the n-grams
    of the test-set file `test_set` that at least one of the texts contains, as texts of `words`
    lower-cased words. In a text no n-gram runs across `<unk>`. Raises BadInput if the test set
    cannot be read."""
    ngrams = ngrams_of_files((test_set,), words, words)
    read = 0
    contained = set[str]()
    for text in texts:
        read += 1
        for passage in text.split(UNKNOWN_WORD):
            contained.update(ngram for _, ngram in ngrams.matches(passage))
    return read, contained


def overlap(found: set[str], test_set: Path, words: int) -> JSON:
    """Return the statistic of the test-set file `test_set` as a dict. The argument `found` has the
    n-grams of this file, of `words` words each, that are in any shard. `percent` and `occurrences`
    count every n-gram in the test set, as the papers do. `occurrences` has two numbers: under
    `ngrams` how many there are, and under `found` how many of them were found. `percent` is 0 if
    there are no n-grams.

    `distinct` has these two numbers for different n-grams, and `documents` the pair [ngrams, found]
    for each document of the test set, in order. Raises BadInput if the test set cannot be read.
    """
    documents = []
    for document in read_documents(test_set):
        ngrams_here = []
        for passage in map(words_of, document):
            if len(passage) >= words:
                ngrams_here += runs_of(passage, words)
        documents.append(ngrams_here)
    shares = [[len(document), sum(ngram in found for ngram in document)] for document in documents]
    ngrams, present = (sum(share[column] for share in shares) for column in (0, 1))
    return {
        "percent": 100 * present / ngrams if ngrams else 0.0,
        "occurrences": {"ngrams": ngrams, "found": present},
        "distinct": {
            "ngrams": len(set(chain.from_iterable(documents))),
            "found": len(found),
        },
        "documents": shares,
    }


def measure_overlap(
    config: DataConfig,
    sources: OpenedSources,
    test_sets: dict[str, Path],
    workspace: Workspace,
    directory: Path,
) -> None:
    """Search the sources for the n-grams of the test sets in `test_sets`, a dict name → path, in
    tasks of the workspace; an n-gram has the number of words of `config.overlap`. Write
    `overlap.json` to `directory`: under `test_sets`, by name, `texts`, the number of the sources'
    texts, and the statistic of the function `overlap`, such as `percent`, 0 to 100, of the test
    set's n-grams that the sources contain; and beside `test_sets` also `source` and `ngram_words`.
    Raises BadInput if the sources have no documents or more damaged files than the recipe allows,
    or a test set cannot be read, and the errors of reading the sources. Prints to standard error a
    warning of fewer damaged files."""
    shards = sources.shards(workspace, choose_shard_bytes(config.shard_bytes, sources.total_bytes))
    words = config.overlap.ngram_words
    results: JSON = {}
    for name, path in test_sets.items():
        fixed = {
            "max_line_bytes": config.sources.max_line_bytes,
            "goes_on": config.sources.max_bad_files > 0,
            "test_set": str(path),
            "words": words,
        }
        jobs: list[Job] = [({**fixed, "pieces": shard}, ()) for shard in shards]
        counted = workspace.all(
            f"overlap-{len(results)}", count_shard, jobs, f"overlap with {name}"
        )
        if not results:  # every test set meets the same damage
            of_shards = (task_counts["damaged"] for task_counts in counted.counts)
            check_damaged([*chain.from_iterable(of_shards)], config.sources.max_bad_files)
        present = set()
        for number in range(len(shards)):
            present.update(
                (counted.task(number).path / FOUND).read_text(encoding="utf-8").split("\n")[:-1]
            )
        if not (texts := sum(task_counts["texts"] for task_counts in counted.counts)):
            raise BadInput(
                "the corpus is empty: correct the sources or name others, as"
                f" {sources.describe()} gave no documents"
            )
        results[name] = {"texts": texts} | overlap(present, path, words)
    write_json(
        directory / RESULT,
        {"source": sources.describe(), "ngram_words": words, "test_sets": results},
    )


def count_shard(settings: Settings, inputs: list[Path], directory: Path) -> Counts:
    """Task: write the n-grams of a test set that a shard of the input contains, each once, sorted,
    one a line, to `found.txt`. Settings: `test_set`, the test set's file; `words`, the number of
    words of an n-gram; `pieces`, the list of the shard's Pieces; `max_line_bytes`, above which a
    line is left out; and `goes_on`. Returns a dict with the number of the shard's texts, `texts`,
    and `damaged`, a list of a sentence for each damaged piece, whose texts before the damage are
    counted; without `goes_on`, Damaged is raised for the first damaged piece. Raises BadInput if
    the test set cannot be read, and the other errors of `read_pieces`, such as Interrupted if a
    file was changed."""
    damaged: list[str] = []
    items = read_sound(settings["pieces"], settings["max_line_bytes"], settings["goes_on"], damaged)
    texts = (item.text for item in items if isinstance(item, Document))
    read, present = count_overlap(texts, Path(settings["test_set"]), settings["words"])
    (directory / FOUND).write_text(
        "".join(f"{ngram}\n" for ngram in sorted(present)), encoding="utf-8"
    )
    return {"texts": read, "damaged": damaged}
