"""Held-out splits of data sets are told from training text, in whichever form a data set lies."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from mlm_repro.data_pipeline.config import SourcesConfig
from mlm_repro.data_pipeline.document import Document
from mlm_repro.data_pipeline.reading import hub
from mlm_repro.data_pipeline.reading.file_sources import FileSource
from mlm_repro.data_pipeline.reading.readers import read_pieces
from mlm_repro.data_pipeline.reading.splits import tell_splits
from mlm_repro.data_pipeline.work.executors.local import LocalExecutor
from mlm_repro.data_pipeline.work.workspace import Workspace
from mlm_repro.lineage.errors import BadInput

ROWS = {"train": 20, "validation": 4, "test": 10}


def texts(split: str) -> list[str]:
    return [f"{split} {number}" for number in range(ROWS[split])]


def made() -> Any:
    return datasets.DatasetDict(
        {
            split: datasets.Dataset.from_dict({"text": texts(split), "n": [*range(ROWS[split])]})
            for split in ROWS
        }
    )


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One data set as a saved dictionary, as the Parquet and JSON files of a repository, and in a
    cache."""
    folder = tmp_path_factory.mktemp("forms")
    made().save_to_disk(str(folder / "saved"), num_shards={"train": 3, "validation": 1, "test": 2})
    for kind, write in (("parquet", "to_parquet"), ("jsonl", "to_json")):
        for split, rows in made().items():
            for part in range(2):
                place = folder / kind / "data" / f"{split}-{part:05d}-of-00002.{kind}"
                place.parent.mkdir(parents=True, exist_ok=True)
                getattr(rows.shard(2, part), write)(str(place))
    cached = datasets.load_dataset(str(folder / "parquet"), cache_dir=str(folder / "cache"))
    cached["train"].map(lambda row: {"text": row["text"] * 2})  # leaves a file cache-*.arrow there
    place = Path(cached["train"].cache_files[0]["filename"]).parent
    assert list(place.glob("cache-*.arrow"))
    return {
        "saved": f"arrow:{folder / 'saved'}",
        "parquet": f"parquet:{folder / 'parquet'}",
        "jsonl": f"jsonl:{folder / 'jsonl'}",
        "cached": f"arrow:{place}",
        "hub": "hub:made/set",
    }


FORMS = ("saved", "parquet", "jsonl", "cached", "hub")


@pytest.fixture
def hub_is_here(forms: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's data set is the repository on this disk, read by the client as a stream."""
    place = forms["parquet"].partition(":")[2]
    monkeypatch.setattr(hub, "_open", lambda _: datasets.load_dataset(place, streaming=True))
    monkeypatch.setattr(hub.HubSource, "_location", hub.Location("made/set", None, "1"))


def read(name: str, folder: Path, **settings: Any) -> list[str]:
    config = SourcesConfig.model_validate({"names": (name,), **settings})
    source = (hub.HubSource if name.startswith("hub:") else FileSource)(name, config)
    with LocalExecutor(1) as executor:
        pieces = list(source.pieces(Workspace(folder, executor), 1 << 20))
    return [item.text for item in read_pieces(pieces) if isinstance(item, Document)]


@pytest.mark.usefixtures("hub_is_here")
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_data_set_gives_the_same_texts(
    form: str, forms: dict[str, str], tmp_path: Path
) -> None:
    """Without a word the training split alone; other splits, in the order in which they are
    named."""
    assert read(forms[form], tmp_path / "one") == texts("train")
    both = read(forms[form], tmp_path / "two", split=("test", "train"))
    assert both == [*texts("test"), *texts("train")]
    with pytest.raises(BadInput, match=r"has no split dev, but .*test.*sources\.split"):
        read(forms[form], tmp_path / "three", split=("dev",))


def test_what_is_left_out_is_said(
    forms: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    source = FileSource(forms["parquet"], SourcesConfig(names=(forms["parquet"],)))
    assert "the split train, without 4 files of test, validation" in source.describe()
    assert "sources.split can name others" in capsys.readouterr().err


def test_one_split_is_a_list() -> None:
    assert SourcesConfig.model_validate({"names": ("jsonl:x",), "split": "test"}).split == ("test",)


def test_splits_are_told_as_the_hub_s_client_tells_them(tmp_path: Path) -> None:
    """For names of which the client puts every file into exactly one split."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    layouts = [
        ["train.jsonl", "test.jsonl", "dev.jsonl"],
        ["data/first-00000-of-00001.jsonl", "data/second-00000-of-00001.jsonl"],
        ["my_train_set/a.jsonl", "my_validation_set/a.jsonl"],
        ["train/0000.jsonl", "test/train.jsonl"],
        ["c4-train.00000-of-00002.jsonl", "c4-validation.00000-of-00001.jsonl"],
        ["latest.jsonl", "contest.jsonl"],
    ]
    for number, names in enumerate(layouts):
        root = tmp_path / str(number)
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text('{"text": "x"}\n')
        found = DataFilesDict.from_patterns(get_data_patterns(str(root)), base_path=str(root))
        theirs = {
            str(Path(file).relative_to(root)): str(split)
            for split, files in found.items()
            for file in files
        }
        ours = [split or "train" for split in tell_splits(root, names)]
        assert dict(zip(names, ours, strict=True)) == theirs


def test_what_is_named_itself_is_read(tmp_path: Path) -> None:
    """A file, a pattern of one split, and parts that look like the shards of a split are what the
    user means."""
    for name in ("test.jsonl", "data/part-00000-of-00002.jsonl", "data/part-00001-of-00002.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    assert read(f"jsonl:{tmp_path / 'test.jsonl'}", tmp_path) == ["test.jsonl"]
    assert read(f"jsonl:{tmp_path}/te*.jsonl", tmp_path) == ["test.jsonl"]
    assert len(read(f"jsonl:{tmp_path / 'data'}", tmp_path)) == 2
    (tmp_path / "held").mkdir()
    (tmp_path / "test.jsonl").rename(tmp_path / "held" / "test.jsonl")
    with pytest.raises(BadInput, match="has no split train, but test"):
        read(f"jsonl:{tmp_path / 'held'}", tmp_path)
    (tmp_path / "held" / "dataset_dict.json").write_text("[]")
    with pytest.raises(BadInput, match="does not list the splits"):
        read(f"jsonl:{tmp_path / 'held'}", tmp_path)
