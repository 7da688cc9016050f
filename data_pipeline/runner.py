"""From a configuration to a finished dataset directory, or to one that already exists."""

import shutil
import sys
from functools import partial
from pathlib import Path

from data_pipeline.config import DataConfig, TokenizerConfig
from data_pipeline.pipeline import MakeTokenizer, Pipeline
from data_pipeline.sources import open_sources
from data_pipeline.testsets import find_gpt2_vocabulary, find_test_set
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.workers import Workers
from lineage.atomic import new_directory
from lineage.digest import sha256_file
from lineage.errors import BadInput, DataMissing, Interrupted
from lineage.run import MANIFEST, RunDirectory


def build_dataset(config: DataConfig, root: Path) -> RunDirectory:
    """Build the dataset of `config` under `root`, or return it at once, saying so, if it is complete there.

    The files appear together at the end; until then they are in a hidden directory beside the run's, and after an
    error nothing is left. Raises BadInput for input or a root that cannot be used, DataMissing for input that is not
    here, Interrupted when stopped.
    """
    sources = open_sources(config.sources, config.seed)
    test_sets = {name: _find_or_none(name) for name in config.decontaminate.test_sets}
    parents = sources.fingerprints()
    for name, path in test_sets.items():
        parents[f"test set {name}"] = sha256_file(path) if path else "missing"
    make_tokenizer, digests = _prepare_tokenizer(config.tokenizer)
    parents |= digests
    try:
        run = RunDirectory.begin(root, config.name, "data", config.identity(), parents)
        if run.is_complete:
            print(f"already complete: {run.path}", file=sys.stderr)
            run.link()
            return run
        try:
            for leftover in root.glob(f".{run.path.name}.partial-*"):
                shutil.rmtree(leftover)
            with new_directory(run.path) as directory, Workers(config.workers) as workers:
                shutil.copyfile(run.path / MANIFEST, directory / MANIFEST)
                Pipeline(config, sources, test_sets, make_tokenizer, directory, workers).run()
        except BaseException:
            shutil.rmtree(run.path, ignore_errors=True)
            raise
        run.complete()
    except KeyboardInterrupt as error:
        raise Interrupted("interrupted; the same command builds the dataset from the beginning") from error
    except OSError as error:
        raise BadInput(f"the dataset cannot be written: {error}") from error
    return run


def _find_or_none(name: str) -> Path | None:
    try:
        return find_test_set(name)
    except DataMissing as error:
        print(f"WARNING: no decontamination against {name}: {error}", file=sys.stderr)
        return None


def _prepare_tokenizer(config: TokenizerConfig) -> tuple[MakeTokenizer, dict[str, str]]:
    """What makes the tokenizer, and the digests of the files it is made from."""
    if config.kind == "train":
        return partial(Tokenizer.train, vocab_size=config.vocab_size), {}
    published = Tokenizer.from_gpt2_files(*find_gpt2_vocabulary())
    return lambda texts: published, {"tokenizer": published.digest}
