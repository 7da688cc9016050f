"""`python -m benchmarks data`: every answer is compared, and a wrong one is found."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from benchmarks import corpora
from benchmarks.data import cleaning, measure, measure_stage, one_sample
from mlm_repro.lineage.errors import BadInput

TEXTS = [topics[name] for name in sorted(topics)][:20]
STAGES = ["clean", "language", "encode", "deduplicate", "decontaminate"]


@pytest.fixture
def offline(made_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which test sets, but no vocabulary, are found."""
    shutil.copytree(made_data, tmp_path / "data", ignore=shutil.ignore_patterns("gpt2-bpe"))
    for name, value in (
        ("MLM_DATA_DIR", tmp_path / "data"),
        ("HOME", tmp_path),
        ("HF_HUB_OFFLINE", 1),
    ):
        monkeypatch.setenv(name, str(value))
    return tmp_path


def test_every_stage_is_compared_and_nothing_differs(offline: Path) -> None:
    """Five documents come twice, one hardly changed."""
    texts = [*TEXTS, *TEXTS[:5], TEXTS[7].replace("the", "thé", 3)]
    corpus = offline / "corpus.jsonl"
    corpus.write_text(
        "\n".join([*(json.dumps({"text": text}) for text in texts), "not json"]) + "\n"
    )
    result = measure(corpus, rounds=1)
    stages = {case.setting["stage"]: case for case in result.cases if "stage" in case.setting}
    start, workers, whole = result.cases[-3:]
    assert list(stages) == STAGES
    assert result.disagreements == []
    assert (result.setting["corpus"]["documents"], result.setting["corpus"]["malformed"]) == (
        len(texts),
        1,
    )
    assert "the bytes alone, as GPT-2's vocabulary is not here" in result.setting["vocabulary"]
    assert stages["clean"].setting["compared"] == len(texts)
    assert (
        stages["decontaminate"].setting["documents"]
        <= stages["deduplicate"].setting["documents"] - 6
    )
    assert all(
        case.setting["differing"] == 0 < one_sample(case, "ours")
        for case in [*stages.values(), whole]
    )
    assert one_sample(workers, "two workers") > 0 < one_sample(start, "ours")
    assert [case.ratios[0].goal for case in (start, workers, whole)] == [1, 1.7, 30]
    assert 0 < whole.setting["compared"] <= len(TEXTS)
    assert one_sample(whole, "plain") == pytest.approx(
        sum(one_sample(c, "plain") for c in stages.values()), abs=1e-2
    )


def test_a_wrong_answer_is_found() -> None:
    stage = replace(cleaning(), plain=list)
    assert measure_stage(cleaning(), ["a “b” c", "d"])[0].setting["differing"] == 0
    assert measure_stage(stage, ["a “b” c", "d"])[0].setting["differing"] == 1


def test_a_corpus_that_is_too_small_is_refused(offline: Path) -> None:
    (offline / "corpus.jsonl").write_text('{"text": "too short"}\n')
    with pytest.raises(BadInput, match="fewer than two documents of the corpus are left"):
        measure(offline / "corpus.jsonl", rounds=1)


def test_what_a_build_takes_stands_beside_what_a_dry_run_promises() -> None:
    with pytest.raises(BadInput, match="no case 'none'; there are: crawl, "):
        corpora.measure(["none"])
    (case,) = corpora.measure(["crawl"], part=0.001).cases
    assert case.setting["documents"] == 2000
    taken = {(each.contender, each.measure): each.samples[0] for each in case.series}
    assert taken["used", "memory"] > 100
    # Of so small a text blocks of the disk are a share.
    assert taken["used", "disk"] < 2 * taken["promised", "disk"]
    for each in case.ratios:
        what = each.name.split(",")[0]
        assert each.value == pytest.approx(taken["used", what] / taken["promised", what], rel=1e-3)
