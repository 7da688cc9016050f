"""Where test sets and the GPT-2 vocabulary are looked for."""

import json
import sys
import types
from pathlib import Path

import pytest

from mlm_repro.data_pipeline.contamination import testsets
from mlm_repro.data_pipeline.contamination.testsets import (
    TEST_SETS,
    find_gpt2_vocabulary,
    find_test_set,
)
from mlm_repro.lineage.digest import sha256_file
from mlm_repro.lineage.environment import user_cache
from mlm_repro.lineage.errors import BadInput, DataMissing


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLM_DATA_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(testsets, "hub_is_reachable", lambda: False)


def test_data_directory_comes_before_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = user_cache("lambada") / "lambada_test.jsonl"
    cached.parent.mkdir(parents=True)
    cached.write_text("{}")
    assert find_test_set("lambada") == cached
    own = tmp_path / "data" / "lambada" / "lambada_test.jsonl"
    own.parent.mkdir(parents=True)
    own.write_text("{}")
    monkeypatch.setenv("MLM_DATA_DIR", str(tmp_path / "data"))
    assert find_test_set("lambada") == own


def test_the_cache_is_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    cached = tmp_path / "caches" / "mlm-repro" / "lambada" / "lambada_test.jsonl"
    cached.parent.mkdir(parents=True)
    cached.write_text("{}")
    assert find_test_set("lambada") == cached


def test_missing_files_say_where_to_put_them() -> None:
    with pytest.raises(DataMissing, match=r"wikitext-103/wiki\.test\.tokens .* MLM_DATA_DIR"):
        find_test_set("wikitext103")
    with pytest.raises(DataMissing, match=r"gpt2-bpe/vocab\.json"):
        find_gpt2_vocabulary()
    with pytest.raises(ValueError, match="did you mean 'lambada'"):
        testsets.check_test_set_name("lambda")


def test_a_file_of_the_user_is_a_test_set(tmp_path: Path) -> None:
    exam, lines = tmp_path / "exam.jsonl", tmp_path / "lines"
    exam.touch()
    lines.touch()
    assert find_test_set(f"jsonl:{exam}") == exam
    assert find_test_set(f"text:{lines}") == lines
    with pytest.raises(BadInput, match=r"there is no file .*/other\.jsonl"):
        find_test_set(f"jsonl:{tmp_path}/other.jsonl")
    for name in (f"jsonl:{lines}", f"text:{exam}", "text:", "jsonl:"):
        with pytest.raises(ValueError, match="write jsonl:PATH for a path"):
            testsets.check_test_set_name(name)
    with pytest.raises(ValueError, match="unknown test set"):
        testsets.check_test_set_name(f"csv:{lines}")


def serve(monkeypatch: pytest.MonkeyPatch, rows: list[str]) -> None:
    monkeypatch.setattr(testsets, "hub_is_reachable", lambda: True)
    hub = types.SimpleNamespace(load_dataset=lambda *_, **__: {"text": rows})
    monkeypatch.setitem(sys.modules, "datasets", hub)


def test_wrong_content_from_the_hub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, ["something else"])
    for name in TEST_SETS:
        with pytest.raises(DataMissing, match="does not give the published"):
            find_test_set(name)
    assert not user_cache("").exists()


def rows_of(name: str, data: Path) -> list[str]:
    """The file's rows as the hub has them."""
    lines = (data / TEST_SETS[name].place).read_text(encoding="utf-8").splitlines(keepends=True)
    match name:
        case "lambada":
            return [json.loads(line)["text"] for line in lines]
        case "lambada-standard":
            return [line.removesuffix("\n") for line in lines]
    return [line if line.strip() else "" for line in lines]


def assert_rows_make_the_file(name: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, rows_of(name, data))
    found = find_test_set(name)
    assert found.is_relative_to(user_cache(""))
    assert found.read_bytes() == (data / TEST_SETS[name].place).read_bytes()


@pytest.mark.parametrize("name", TEST_SETS)
def test_rows_of_the_hub_make_a_file(
    name: str, made_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = sha256_file(made_data / TEST_SETS[name].place)
    monkeypatch.setitem(
        testsets.TEST_SETS, name, TEST_SETS[name].model_copy(update={"sha256": digest})
    )
    assert_rows_make_the_file(name, made_data, monkeypatch)


def test_rows_of_the_hub_make_the_published_files(
    published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, file in TEST_SETS.items():
        # Which came later than folders that exist.
        if name != "wikitext2" or (published / file.place).is_file():
            assert_rows_make_the_file(name, published, monkeypatch)


def test_what_is_here_is_fetched_although_a_file_is_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last published file is the only one here; the missing one is named after it is
    written."""
    file = testsets.GPT2_FILES[-1]
    here = tmp_path / "data" / file.place
    here.parent.mkdir(parents=True)
    here.write_bytes(b"merges")
    published = file.model_copy(update={"sha256": sha256_file(here)})
    monkeypatch.setattr(testsets, "GPT2_FILES", (*testsets.GPT2_FILES[:-1], published))
    monkeypatch.setenv("MLM_DATA_DIR", str(tmp_path / "data"))
    written: list[Path] = []
    with pytest.raises(DataMissing, match="MLM_DATA_DIR"):
        written.extend(testsets.fetch_published(tmp_path / "out"))
    assert (tmp_path / "out" / file.place).read_bytes() == b"merges"
    assert (tmp_path / "out" / "SHA256SUMS").read_text() == f"{published.sha256}  {file.place}\n"
