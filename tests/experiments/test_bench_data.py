"""`mlm-bench data`: every answer is compared, and a wrong one is found."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from experiments.bench import data_encoding, data_near_duplicates
from experiments.bench.benchmarks.data import whole_case
from experiments.bench.benchmarks.data_scale import memory_bound_bytes
from experiments.bench.data_chain import cleaning, measure_stage, pairs_of_buckets, pairs_of_queries
from experiments.bench.data_whole import core_hours
from lineage.benchmark import Benchmark, Case, read_benchmark
from lineage.errors import BadInput
from lineage.progress import Progress
from tests.commands import Outcome, call

TEXTS = [topics[name] for name in sorted(topics)][:20]
STAGES = ["clean", "language", "encode", "signatures", "group", "verify", "decontaminate"]


def bench(name: str, corpus: Path, *arguments: object) -> Outcome:
    """`mlm-bench NAME` where test sets and a vocabulary can only be in the folder `data` beside the corpus."""
    here = corpus.parent
    alone = {"MLM_DATA_DIR": str(here / "data"), "HOME": str(here), "HF_HUB_OFFLINE": "1"}
    return call(alone | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}, "mlm-bench", name, f"--corpus={corpus}", *arguments)


@pytest.fixture(scope="module")
def run(made_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Benchmark, str]:
    """The result on documents of which five come twice, one hardly changed, and what was printed."""
    folder = tmp_path_factory.mktemp("bench")
    shutil.copytree(made_data, folder / "data", ignore=shutil.ignore_patterns("gpt2-bpe"))
    texts = [*TEXTS, *TEXTS[:5], TEXTS[7].replace("the", "thé", 3)]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "corpus.jsonl").write_text("\n".join([*lines, "not json"]) + "\n", encoding="utf-8")
    done = bench("data", folder / "corpus.jsonl", "--rounds=1", "--json", folder / "data.json")
    assert done.code == 0, done.err
    return read_benchmark(folder / "data.json"), done.out


def test_every_stage_is_compared_and_nothing_differs(run: tuple[Benchmark, str]) -> None:
    result, printed = run
    stages = {case.setting["stage"]: case for case in result.cases if "stage" in case.setting}
    whole = result.cases[len(stages)]
    assert list(stages) == STAGES
    assert (result.setting["corpus"]["documents"], result.setting["corpus"]["malformed"]) == (len(TEXTS) + 6, 1)
    assert number(stages["clean"], "compared") == len(TEXTS) + 6
    assert number(stages["group"], "compared") >= number(stages["verify"], "compared") >= 6
    assert all(number(case, "differing") == 0 for case in (*stages.values(), whole))
    assert all(number(case, "ours") > 0 for case in stages.values())
    assert result.disagreements == []
    assert result.environment.argv == ["mlm-bench", "data", "--corpus=corpus.jsonl", "--rounds=1"]
    assert 0 < number(whole, "compared") <= len(TEXTS)
    assert number(whole, "plain") == pytest.approx(sum(number(case, "plain") for case in stages.values()), abs=1e-2)
    for name in [*STAGES, "whole"]:
        assert name in printed


def number(case: Case, contender: str) -> float:
    """The first of what was counted of a contender."""
    return next(one.samples[0] for one in case.series if one.contender == contender)


def test_without_gpt2s_vocabulary_the_corpus_gives_one_and_the_result_says_so(run: tuple[Benchmark, str]) -> None:
    result, printed = run
    assert re.fullmatch(
        r"[\d,]+ tokens, trained by the whole run, as GPT-2's vocabulary is not here", result.setting["vocabulary"]
    )
    assert result.setting["vocabulary"] in " ".join(printed.split())


def test_a_wrong_answer_is_found() -> None:
    stage = cleaning()
    wrong = replace(stage, ours=lambda texts: [text.replace("“", "'") for text in stage.ours(texts)])
    assert number(measure_stage(stage, ["a “b” c", "d"])[0], "differing") == 0
    wrong = replace(wrong, plain=lambda texts: list(texts))
    assert number(measure_stage(wrong, ["a “b” c", "d"])[0], "differing") == 1


def test_buckets_and_queries_are_pairs() -> None:
    assert pairs_of_buckets([([3, 5, 8, 1, 2], [0, 3, 5]), ([3, 5], [0, 2])]) == {(3, 5), (3, 8), (5, 8), (1, 2)}
    assert pairs_of_queries([[], [0], [], [0, 1]]) == {(0, 1), (0, 3), (1, 3)}


def test_a_corpus_that_costs_hardly_more_than_starting_has_no_ratio(run: tuple[Benchmark, str]) -> None:
    case = whole_case(40.0, [(7.0, 5.0), (8.5, 5.5)], 14.0, 3.5, 1, 0)
    assert case.ratios[0].rounds == [15.0, 10.0]
    assert [one.samples for one in case.series if one.measure == "throughput"] == [[5.25, 3.5]]
    for seconds in (4.9, 5.0, 6.2):
        case = whole_case(40.0, [(7.0, 5.0), (seconds, 5.0)], 14.0, 3.5, 1, 0)
        assert (case.ratios, list(case.missing)) == ([], ["ours"])
    whole = next(case for case in run[0].cases if case.name.startswith("whole"))
    assert ("too small" in run[1]) == (whole.ratios == [])


def test_core_hours_are_those_of_the_papers_corpus() -> None:
    assert core_hours(3600, 174_000) == pytest.approx(1)


def stage_of_topics(folder: Path, stage: str, size: int) -> list[Case]:
    """What `mlm-bench data --stage` measures on Python's help topics."""
    lines = [json.dumps({"text": text}) for text in topics.values()]
    (folder / "corpus.jsonl").write_text("\n".join(lines), encoding="utf-8")
    out = folder / "result.json"
    done = bench("data", folder / "corpus.jsonl", f"--stage={stage}", f"--size={size}", "--json", out)
    assert done.code == 0, done.err
    return read_benchmark(out).cases


def test_encoders_give_the_ids_of_tokenizers(tmp_path: Path) -> None:
    *cases, unmeasured = stage_of_topics(tmp_path, "encoding", 300)
    assert [case.name for case in cases if case.setting["texts"] == 300] == ["fuzzed strings, 1 core"]
    assert len(cases) == 7
    for case in cases:
        measured = {one.contender for one in case.series if one.measure == "throughput"}
        differing = {one.contender: one.samples for one in case.series if one.measure == "texts with other ids"}
        assert case.ratios[-1].goal == 1
        assert measured == differing.keys() == data_encoding.ENCODERS.keys() - unmeasured.missing.keys()
        assert all(differing[name] == [0] for name in ("fastokens", "tiktoken"))
    assert data_encoding.UNABLE.keys() <= unmeasured.missing.keys()


def test_an_encoder_with_other_ids_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = {"tokenizers": [b"a", b"b"], "fastokens": [b"a", b"c"], "tokie": [b"a", b"b"]}
    monkeypatch.setattr(data_encoding, "in_new_process", lambda seconds, run, name, *arguments: (1.0, answers[name]))
    with Progress("encoding", 3, "encoders") as progress:
        case, of_ours = data_encoding.compare_encoders("text", 1, ["x", "y"], list(answers), tmp_path, progress)
    assert {one.contender: one.samples[0] for one in case.series if one.unit == ""} == {
        "tokenizers": 0, "fastokens": 1, "tokie": 0
    }  # fmt: skip
    assert of_ours == 1


@pytest.mark.parametrize("content", ["", "not json\n", '{"text": "too short"}\n'])
def test_a_corpus_that_is_too_small_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(content, encoding="utf-8")
    done = bench("data", tmp_path / "corpus.jsonl")
    assert done.code == 2
    assert "too little of the corpus is left" in done.err
    assert bench("data", tmp_path / "missing.jsonl").code == 2


def test_scale_is_measured_within_the_bound(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in topics.values()]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines), encoding="utf-8")
    scale = tmp_path / "scale.json"
    done = bench("data-scale", tmp_path / "corpus.jsonl", f"--json={scale}", "--megabytes=16")
    assert done.code == 0, done.err
    result = read_benchmark(scale)
    case, everything = result.cases
    assert case.at == pytest.approx(16, rel=0.05)
    found = {(one.contender, one.measure): one.samples[0] for one in case.series}
    assert found["measured", "throughput"] > 0
    bound = memory_bound_bytes(case.setting["documents"], case.setting["largest_document_bytes"], 2)
    assert found["stated bound", "peak memory"] == bound
    assert 100e6 < found["measured", "peak memory"] <= bound
    spread, of_workers, to_machine = everything.ratios
    assert case.ratios[0].is_reached
    assert spread.is_reached
    assert (of_workers.name, of_workers.goal) == ("one worker's time ÷ that of 2 at 16 MB", 1.9)
    clocks = [found[f"clock, workers: {count}", "time"] for count in (1, 2)]
    assert of_workers.value == pytest.approx(clocks[0] / clocks[1], rel=1e-3)
    together = found["clock, builds at once: 2", "time"]
    assert (to_machine.goal, to_machine.value) == (0.95, pytest.approx(together / 2 / clocks[1], rel=1e-3))
    assert str(tmp_path) not in scale.read_text(encoding="utf-8")
    assert result.environment.argv == [
        "mlm-bench", "data-scale", "--corpus=corpus.jsonl", "--megabytes=16"
    ]  # fmt: skip


def test_near_duplicates_are_dropped_and_others_stay(tmp_path: Path) -> None:
    (case,) = stage_of_topics(tmp_path, "near-duplicates", 400)
    assert {one.contender for one in case.series} == data_near_duplicates.CONTENDERS.keys() - case.missing.keys()
    ours = {one.measure: one.samples[0] for one in case.series if one.contender == "ours"}
    assert case.setting["copies"] == 40
    assert 10 < case.setting["near-duplicates"] < 40
    assert ours["of the near-duplicates, dropped"] > 0.9
    assert ours["pairs of at least 0.8 left"] == ours["documents dropped that are like no other"] == 0
    assert len(case.ratios) == len(data_near_duplicates.CONTENDERS.keys() - case.missing.keys()) - 1


@pytest.mark.parametrize(("keeps_all", "wrong"), [(True, "pairs of at least 0.8 left"), (False, "like no other")])
def test_a_near_duplicate_that_is_left_or_another_that_goes_is_found(
    monkeypatch: pytest.MonkeyPatch, keeps_all: bool, wrong: str
) -> None:
    texts = [topics[name] for name in sorted(topics)]
    originals = data_near_duplicates.make_documents(texts, 200).originals
    unlike = next(number for number in range(200) if number not in {*originals, *originals.values()})
    answer = data_near_duplicates.Taken(1.0, 1, set() if keeps_all else {unlike, *originals})
    monkeypatch.setattr(data_near_duplicates, "CONTENDERS", {"ours": None})
    monkeypatch.setattr(data_near_duplicates, "in_new_process", lambda *arguments: answer)
    result = data_near_duplicates.measure_near_duplicates(texts, 200, {})
    assert len(result.disagreements) == 1
    assert wrong in result.disagreements[0]


def test_a_corpus_of_few_sentences_is_refused() -> None:
    with pytest.raises(BadInput, match="too few"):
        data_near_duplicates.make_documents(["One sentence is not enough to make documents of, is it?"] * 50, 20)
