"""`mlm-bench data`: every answer is compared, and a wrong one is found."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from experiments.bench.benchmarks.data import whole_case
from experiments.bench.data_chain import cleaning, measure_stage, pairs_of_buckets, pairs_of_queries
from experiments.bench.data_whole import core_hours
from lineage.benchmark import Benchmark, Case, read_benchmark
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


@pytest.mark.parametrize("content", ["", "not json\n", '{"text": "too short"}\n'])
def test_a_corpus_that_is_too_small_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(content, encoding="utf-8")
    done = bench("data", tmp_path / "corpus.jsonl")
    assert done.code == 2
    assert "too little of the corpus is left" in done.err
    assert bench("data", tmp_path / "missing.jsonl").code == 2
