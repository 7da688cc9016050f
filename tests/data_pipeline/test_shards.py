"""A dataset in shards: the documents and tokens of the dataset in one piece, read as one by all who
read datasets."""

from dataclasses import asdict
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from mlm_repro.data_pipeline.document import written_documents
from mlm_repro.data_pipeline.tokens.token_file import TokenFile, split_prefixes
from mlm_repro.engine.data.dataset import DatasetFacts
from mlm_repro.verify.cli import main as verify_main
from tests.commands import Command
from tests.data_pipeline.builds import build, config_for, files_of, ledger_of, write_mixed
from tests.data_pipeline.test_samples import _one_rank as _one_rank
from tests.data_pipeline.test_samples import assert_samples_are_megatrons

SHARDS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same corpus in one piece and in shards."""
    folder = tmp_path_factory.mktemp("shards")
    source = f"jsonl:{write_mixed(folder, 160)}"
    build(folder, config_for(source), "whole")
    build(folder, config_for(source, f"shards={SHARDS}"), "sharded")
    return folder


def test_shards_hold_the_documents_and_tokens_of_the_whole_in_order(folder: Path) -> None:
    whole, sharded = folder / "whole/small", folder / "sharded/small"
    for split, count in (("train", SHARDS), ("valid", 1)):
        prefixes = split_prefixes(sharded, split)
        assert [each.name for each in prefixes] == [
            f"{split}-{number:05d}-of-{count:05d}_text_document" for number in range(count)
        ]
        parts, one = [*map(TokenFile, prefixes)], TokenFile(whole / f"{split}_text_document")
        assert np.array_equal(np.concatenate([part.tokens for part in parts]), one.tokens)
        assert np.array_equal(np.concatenate([part.sizes for part in parts]), one.sizes)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        tables = sorted((sharded / "documents").glob(f"{split}-*.parquet"))
        texts = [[asdict(document) for document in written_documents(path)] for path in tables]
        assert [*chain(*texts)] == [
            *map(asdict, written_documents(whole / f"documents/{split}.jsonl"))
        ]
        assert [*map(len, texts)] == [*map(len, parts)]
    assert ledger_of(whole) == ledger_of(sharded)


def test_shards_do_not_depend_on_workers_or_slices(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlm_repro.data_pipeline.passes.gather.SLICE_BYTES", 9000)
    made = build(
        folder,
        config_for(f"jsonl:{folder / 'corpus.jsonl'}", f"shards={SHARDS}", "workers=2"),
        "two",
    )
    assert files_of(made) == files_of(folder / "sharded/small")


def test_a_few_documents_are_no_more_shards_than_documents(folder: Path) -> None:
    few = folder / "few.jsonl"
    few.write_bytes(
        b"".join((folder / "corpus.jsonl").read_bytes().splitlines(keepends=True)[6:12])
    )
    made = build(folder, config_for(f"jsonl:{few}", "shards=64"), "few")
    assert [len(split_prefixes(made, split)) for split in ("train", "valid")] == [4, 1]


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.filterwarnings("ignore")
def test_the_engine_and_megatron_core_read_the_shards_as_one_blend(
    folder: Path, tmp_path: Path
) -> None:
    facts = DatasetFacts.read(folder / "sharded/small")
    blend = facts.prefixes("train")
    sizes = [len(TokenFile(prefix).tokens) for prefix, _ in blend]
    assert [weight for _, weight in blend] == pytest.approx([size / sum(sizes) for size in sizes])
    assert_samples_are_megatrons(blend, sum(sizes) // 64, 64, tmp_path / "cache", facts.vocab_size)


def test_a_blend_shares_the_weight_of_a_dataset_among_its_shards(folder: Path) -> None:
    facts = DatasetFacts.read([(folder / "sharded/small", 3.0), (folder / "whole/small", 1.0)])
    weights = [weight for _, weight in facts.prefixes("train")]
    assert sum(weights[:SHARDS]) == pytest.approx(0.75)
    assert weights[SHARDS:] == [0.25]


def test_verbs_and_commands_read_shards(folder: Path, cli: Command, command: Command) -> None:
    whole, sharded = folder / "whole/small", folder / "sharded/small"
    command(verify_main, "mlm-verify", "run", sharded, ends=0)
    for name, dataset in (("a", whole), ("b", sharded)):
        cli("clean", dataset, name, "--workers", 1, ends=0)
    assert files_of(Path("a")) == files_of(Path("b"))


def test_a_changed_document_of_a_shard_is_found(
    folder: Path, command: Command, tmp_path: Path
) -> None:
    import shutil

    from mlm_repro.data_pipeline.remade import card
    from mlm_repro.lineage.digest import MARKER, seal

    copy = Path(shutil.copytree((folder / "sharded/small").resolve(), tmp_path / "small"))
    tables = sorted((copy / "documents").glob("train-*.parquet"))
    shutil.copyfile(tables[0], tables[1])
    (copy / MARKER).unlink()
    seal(copy)
    assert [each.where for each in card(copy) if each.said != each.gives]
