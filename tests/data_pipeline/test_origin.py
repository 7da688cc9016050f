"""A dataset's identity has the code that its stages run and the libraries that this calls, and nothing else."""

import ast
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.data_pipeline.earlier import recipe_made_by
from mlm_repro.data_pipeline.reading.pieces import Piece
from mlm_repro.data_pipeline.work import origin
from mlm_repro.data_pipeline.work.origin import OPTIONAL, ROOTS, SILENT, differences, summary, task_made_by
from tests.architecture.rooms import ROOT
from tests.data_pipeline.copies import change, copy_of_library, copy_of_package

NOTHING = {
    "a comment": ("data_pipeline/passes/measure.py", "BATCH_CHARACTERS = 1 << 20", "BATCH_CHARACTERS = 1 << 20  # so"),
    "a comment of the hub": ("data_pipeline/reading/hub.py", "TEXT_PER_BYTE = 3", "# so\nTEXT_PER_BYTE = 3"),
    "a docstring": ("data_pipeline/stages/clean.py", '"""The repaired text."""', '"""The text, repaired."""'),
    "what is said of a field": ("data_pipeline/stages/clean.py", '"""Unicode normal form of', '"""The form of'),
    "layout": (
        "data_pipeline/stages/length.py",
        "min_tokens: PositiveInt = 128",
        "min_tokens: PositiveInt = (\n    128)",
    ),
    "the sentence of an error": ("data_pipeline/pipeline.py", "too few for a training and", "and that is too few for"),
    "another one": ("data_pipeline/files.py", "the corpus is empty", "the corpus has nothing"),
    "a warning": ("data_pipeline/reading/file_sources.py", "warning: {self.name} leaves", "warning: {self.name} left"),
    "the module of errors": ("lineage/errors.py", "exit_code = 70", "exit_code = 71"),
    "progress": ("lineage/progress.py", "SHOWN_AFTER_SECONDS = 2.0", "SHOWN_AFTER_SECONDS = 3.0"),
    "the command line": ("data_pipeline/cli.py", '"source: {ledger.source}"', '"sources: {ledger.source}"'),
    "an executor": ("data_pipeline/work/executors/local.py", "ATTEMPTS = 3", "ATTEMPTS = 4"),
    "a stage that is not done": ("data_pipeline/stages/prose.py", "min_words: PositiveInt = 50", "min_words: int = 51"),
    "a source that is not read": ("data_pipeline/reading/hub.py", "TEXT_PER_BYTE = 3", "TEXT_PER_BYTE = 4"),
}
ONE = {
    "source": ("lineage/atomic.py", "json.loads(text, obj", "json.loads(text, parse_constant=None, obj"),
    "clean": ("data_pipeline/fast/exact_ftfy.py", "MOST_PASSES = 64", "MOST_PASSES = 65"),
    "language": ("data_pipeline/stages/language.py", "probability(text) >=", "probability(text) >"),
    "tokenizer": ("data_pipeline/passes/train_tokenizer.py", "TRAINING_BYTES = 2 << 30", "TRAINING_BYTES = 1 << 30"),
    "measure": ("data_pipeline/passes/measure.py", "BATCH_CHARACTERS = 1 << 20", "BATCH_CHARACTERS = 1 << 21"),
    "length": ("data_pipeline/stages/length.py", "tokens >= self.min_tokens", "tokens > self.min_tokens"),
    "deduplicate": ("data_pipeline/duplicates/near_duplicates.py", "MOST_COMPARED = 1000", "MOST_COMPARED = 1001"),
    "decontaminate": ("data_pipeline/contamination/words.py", "return [word.lower()", "return [word.casefold()"),
    "select": ("data_pipeline/passes/selection.py", "round(share, 4)", "round(share, 5)"),
    "gather": ("data_pipeline/passes/gather.py", "= 64 << 20", "= 32 << 20"),
    "publish": ("data_pipeline/publish.py", "round(jaccard, 6)", "round(jaccard, 7)"),
}
LIBRARY_OF = {"ftfy": "clean", "langdetect": "language", "tokenizers": "tokenizer", "fastokens": "tokenizer",
              "datasketch": "deduplicate", "orjson": "source"}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_package(tmp_path_factory.mktemp("origin") / "whole")


@pytest.fixture
def copy(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the package, whose code is the one that is looked at."""
    shutil.copytree(whole, tmp_path / "copy", symlinks=True)
    monkeypatch.setattr(origin, "HOME", tmp_path / "copy")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caches = origin._path_of, origin._task_made_by, origin._library
    for each in caches:
        each.cache_clear()
    yield tmp_path / "copy"
    for each in caches:
        each.cache_clear()


def facts(*sources: str, **sections: object) -> dict[str, str]:
    """What a recipe over the sources is made by."""
    config = DataConfig.model_validate({"name": "a", "sources": {"names": sources or ("jsonl:a",)}, **sections})
    return recipe_made_by(config, config.sources.names)


def moved(old: dict[str, str], new: dict[str, str]) -> set[str]:
    return {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}


@pytest.mark.parametrize("edit", NOTHING.values(), ids=NOTHING)
def test_an_edit_that_decides_no_byte_moves_nothing(edit: tuple[str, str, str], copy: Path) -> None:
    before = facts()
    change(copy / edit[0], *edit[1:])
    assert facts() == before


@pytest.mark.parametrize("part", ONE)
def test_an_edit_of_code_moves_its_part_alone_and_is_said(part: str, copy: Path) -> None:
    before = facts()
    change(copy / ONE[part][0], *ONE[part][1:])
    assert moved(before, facts()) == {f"{part}: code"}
    assert differences(before, facts()) == [f"the code of {part}"]


def test_sources_bring_their_own_code(copy: Path) -> None:
    names = ("jsonl:a", "installed-docs", "hub:a/b", "parquet:a")
    before = {name: facts(name) for name in names}
    assert moved(before["jsonl:a"], before["parquet:a"]) == {"source: pyarrow"}
    change(copy / "data_pipeline/reading/hub.py", "TEXT_PER_BYTE = 3", "TEXT_PER_BYTE = 4")
    change(copy / "data_pipeline/reading/installed_docs.py", 'TEST_FOLDERS = {"test", "tests"}', "TEST_FOLDERS = {1}")
    changed = {name: moved(before[name], facts(name)) for name in names}
    assert changed == {"jsonl:a": set(), "installed-docs": {"installed-docs: code"}, "hub:a/b": {"hub: code"},
                       "parquet:a": set()}  # fmt: skip


def test_a_new_file_with_a_stage_moves_nothing_until_a_recipe_names_it(copy: Path) -> None:
    before = facts()
    shutil.copyfile(copy / "data_pipeline/stages/prose.py", copy / "data_pipeline/stages/letters.py")
    assert facts() == before
    named = facts(stages=["clean", "language", "prose", "length", "deduplicate", "decontaminate", "split", "tokenize"])
    assert moved(before, named) == {"prose: code"}


@pytest.mark.parametrize("name", LIBRARY_OF)
def test_a_library_counts_with_its_content(name: str, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)  # a library that is in use is the one that counts
    before, key = facts(), f"{LIBRARY_OF[name]}: {name}"
    number = before[key].split()[0]

    def with_copy(*about: str) -> tuple[Path, dict[str, str]]:
        place = copy_of_library(name, copy / f"libraries{len(about)}", *about)
        monkeypatch.syspath_prepend(place)
        origin._library.cache_clear()
        return place / name, facts()

    place, same = with_copy()
    assert same == before, "the same files elsewhere are the same library"
    (place / "more.py").write_text("more = 1\n", encoding="utf-8")
    origin._library.cache_clear()
    assert moved(before, facts()) == {key}
    assert differences(before, facts()) == [f"{name} {number} with other files ({LIBRARY_OF[name]})"]
    _, other = with_copy("99.1")
    assert differences(before, other) == [f"{name} {number} → 99.1 ({LIBRARY_OF[name]})"]


def test_tasks_follow_the_same_truth(copy: Path) -> None:
    """Each edit makes anew the first task that runs the code; those behind it depend on what that made."""
    module = "mlm_repro.data_pipeline.passes."
    piece = Piece("jsonl", "a", "a", "", 0)
    given = {
        "prepare": {"filters": [("clean", {}), ("language", {})], "pieces": [piece]},
        "measure": {"filters": [("length", {})], "deduplicate": {}, "decontaminate": None, "tokenizer": "a"} | {
            "deduplicate": {"bands": 1}
        },
        "selection": {"deduplicate": True, "decontaminate": None, "tokenizer": "a"},
    }  # fmt: skip

    def tasks() -> dict[str, dict[str, str]]:
        origin._task_made_by.cache_clear()
        return {name: task_made_by(module + name, settings) for name, settings in given.items()}

    remade = {}
    for part, (file, old, new) in ONE.items():
        before = tasks()
        change(copy / file, old, new)
        after = tasks()
        remade[part] = [name for name in given if before[name] != after[name]]
    assert remade == {
        "source": ["prepare", "measure", "selection"], "clean": ["prepare"], "language": ["prepare"], "tokenizer": [],
        "measure": ["measure", "selection"], "length": ["measure"], "deduplicate": ["selection"], "decontaminate": [],
        "select": ["selection"], "gather": [], "publish": [],
    }  # fmt: skip
    assert {"ftfy", "langdetect"} <= tasks()["prepare"].keys()
    assert "tokenizers" not in tasks()["prepare"]
    assert "tokenizers" in tasks()["measure"]
    given["measure"]["deduplicate"] = None
    assert "datasketch" not in tasks()["measure"]


def test_what_says_locks_or_places_is_a_list_of_modules_that_are_met() -> None:
    """Each module that is left out is one that the build imports; what it is not for stands beside it."""
    met = set()
    waiting = [f"data_pipeline.{root}" for part in ROOTS.values() for root in part] + ["data_pipeline.runner"]
    while waiting:
        name = waiting.pop()
        if (path := origin._path_of(name)) and name not in met:
            met.add(name)
            _, imports = summary(Path(path))
            ours = [each.removeprefix("mlm_repro.") for each in imports if each.startswith("mlm_repro.")]
            waiting += [each if origin._path_of(each) else each.rpartition(".")[0] for each in ours]
    assert SILENT.keys() <= met
    assert all(len(reason.split()) > 2 for reason in SILENT.values())
    assert set(OPTIONAL) < set(ROOTS)


FILES = [*(ROOT / "data_pipeline").rglob("*.py"), *(ROOT / "lineage").rglob("*.py")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_comments_docstrings_and_layout_are_no_code(path: Path, tmp_path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant("Another text.")
    plain = tmp_path / "plain.py"
    plain.write_text(f"# no comment\n{ast.unparse(tree)}\n", encoding="utf-8")
    assert summary(plain) == summary(path)
    plain.write_text(f"{ast.unparse(tree)}\nbrand_new = 1\n", encoding="utf-8")
    assert summary(plain)[0] != summary(path)[0]


NAMES = st.sampled_from(["a", "b", "c"])
LINES = st.one_of(
    st.builds("{} = {}".format, NAMES, st.integers(0, 3)),
    st.builds("{} = '{}'".format, NAMES, st.sampled_from(["", "x", "# no comment"])),
    st.builds("def {}({}): return {}".format, NAMES, NAMES, st.integers(0, 2)),
    st.builds("if {}: {} += 1".format, NAMES, NAMES),
)


@given(st.lists(LINES, max_size=4), st.lists(LINES, max_size=4))
def test_two_codes_have_one_digest_only_if_they_are_one(left: list[str], right: list[str]) -> None:
    trees = [ast.parse("\n".join(lines)) for lines in (left, right)]
    shapes = [list(origin._shape(tree, set())) for tree in trees]
    assert (shapes[0] == shapes[1]) == (ast.dump(trees[0]) == ast.dump(trees[1]))


def test_sentences_of_our_errors_alone_are_left_out(tmp_path: Path) -> None:
    text = (
        "from mlm_repro.lineage.errors import BadInput as Bad, DataMissing\n"
        "def work(x):\n"
        "    if x: raise DataMissing(f'no {x}') from None\n"
        "    raise ValueError('wrong')\n"
    )
    path = tmp_path / "a.py"

    def digest(old: str, new: str) -> str:
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")
        return str(summary(path)[0])

    same = digest("no", "no")
    assert digest("no {x}", "there is no {x}") == same
    assert digest("wrong", "not right") != same, "it may stand in a quarantine"
    assert digest("raise DataMissing(f'no {x}') from None", "pass") != same
    assert digest("if x:", "if not x:") != same


def test_reasons_of_quarantine_count() -> None:
    """A damaged file's sentence stands in a dataset, so its error is no one of those that end the command."""
    text = (ROOT / "data_pipeline/reading/readers.py").read_text(encoding="utf-8")
    assert re.findall(r"raise (\w+)\(f\"[^\"]*\{GO_ON\}", text) == ["Damaged", "Damaged"]
    assert "    except Damaged as error:" in (ROOT / "data_pipeline/passes/prepare.py").read_text(encoding="utf-8")
