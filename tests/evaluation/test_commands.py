"""`mlm-eval` on everything: all protocols at once, two checkpoints, a user's own text, others'
formats."""

import csv
import json
import math
from pathlib import Path

import pytest

from mlm_repro.engine.formats.convert import export_checkpoint, import_checkpoint
from mlm_repro.evaluation.tasks.documents import RunningText
from mlm_repro.evaluation.tasks.names import TASKS
from tests.commands import Command
from tests.engine.test_formats_checkpoint import write_rough
from tests.engine.test_formats_megatron import save
from tests.evaluation.conftest import Evaluated
from tests.evaluation.standins import sentences, write_run


def test_all_protocols_in_one_pass(
    run: Path,
    made_passes_for_published: RunningText,
    tmp_path: Path,
    mlm_eval: Command,
    evaluated: Evaluated,
) -> None:
    target, samples = tmp_path / "all.json", tmp_path / "samples.jsonl"
    done = mlm_eval(
        "all",
        "--ckpt",
        run,
        "--limit",
        5,
        "--samples",
        samples,
        "--json",
        target,
        "--set",
        "workers=1",
    )
    found = json.loads(target.read_text())
    results, out = found["results"], done.out
    assert found["missing"].keys() == {"wikitext103-memory"}  # a GPT-2 remembers nothing
    assert results.keys() == TASKS.keys() - found["missing"].keys()
    assert all(name in out and result["protocol"] in out for name, result in results.items())
    assert len({result["protocol"] for result in results.values()}) == len(results)
    single = evaluated("lambada-standard", "--ckpt", run, "--limit", 5)
    assert results["lambada-standard"]["perplexity"] == pytest.approx(
        single["perplexity"], rel=1e-6
    )

    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [line["task"] for line in lines] == [name for name in results for _ in range(5)]
    for name, result in results.items():
        own = [line for line in lines if line["task"] == name]
        assert sum(len(line["tokens"]) for line in own) == result["num_scored_tokens"]
        if "accuracy" in result:
            assert result["num_correct"] == sum(line["correct"] for line in own)
            nll = -sum(map(sum, (line["log_probabilities"] for line in own)))
            assert result["perplexity"] == pytest.approx(math.exp(nll / 5), rel=1e-9)


def test_conventions_of_one_run_differ_by_the_divisor_alone(
    run: Path, made_passes_for_published: RunningText, evaluated: Evaluated
) -> None:
    text = made_passes_for_published
    result = evaluated("wikitext103", "--ckpt", run, "--limit", 30)
    nll, share = (
        result["loss_per_token"] * result["num_scored_tokens"],
        result["normaliser"] / text.num_original_tokens,
    )
    assert result["original_token_perplexity"] == result["perplexity"]
    assert math.log(result["lm_eval_word_perplexity"]) == pytest.approx(
        nll / (text.num_lm_eval_words * share)
    )
    assert result["bits_per_byte"] == pytest.approx(nll / math.log(2) / (text.num_bytes * share))
    assert sum(block["nll"] for block in result["blocks"]) == pytest.approx(nll)
    assert sum(block["num_scored"] for block in result["blocks"]) == result["num_scored_tokens"]
    assert result["log_perplexity_standard_error"] > 0


def test_two_checkpoints(
    run: Path, made_passes_for_published: RunningText, tmp_path: Path, mlm_eval: Command
) -> None:
    uniform = write_run(tmp_path / "runs", zero=True)
    kept: list[Path] = []
    for number, checkpoint in enumerate((run, uniform)):
        kept.append(tmp_path / f"{number}.json")
        mlm_eval(
            "all",
            "--ckpt",
            checkpoint,
            "--limit",
            6,
            "--json",
            kept[-1],
            "--set",
            "workers=1",
            ends=0,
        )
    target = tmp_path / "compared.json"
    done = mlm_eval("compare", *kept, "--json", target, ends=0)
    found = {each["task"]: each for each in json.loads(target.read_text())["differences"]}
    words, cloze = found["wikitext103"], found["lambada"]
    results = [json.loads(file.read_text())["results"] for file in kept]
    first, second = (each["wikitext103"]["perplexity"] for each in results)
    assert words["log_perplexity"] == pytest.approx(math.log(second / first))
    assert words["log_perplexity_standard_error"] > 0
    assert cloze["num_pairs"] == 6
    headings, rule, *lines = filter(str.strip, done.out.splitlines())
    assert headings.startswith("|model")
    assert set(rule) <= set("|-: ")
    assert lines[0].count("|") == headings.count("|") == rule.count("|")
    assert "ln ppl - first" in done.out
    low, high = words["interval"]
    assert low < words["log_perplexity"] < high
    assert 0 <= words["p"] <= 1
    table = tmp_path / "compared.csv"
    mlm_eval("compare", kept[0], kept[0], "--json", target, "--csv", table, ends=0)
    same = json.loads(target.read_text())["differences"]
    with table.open() as file:
        rows = [*csv.DictReader(file)]
    assert len({row["model"] for row in rows}) == 1
    # Of two models of one name the first has no difference from itself.
    changes = [row["ln ppl - first"] for row in rows]
    assert changes == [""] * len(same) + ["0"] * len(same)
    assert [row["perplexity"] for row in rows[: len(same)]] == [
        f"{result['perplexity']:.6g}" for result in results[0].values()
    ]
    assert {(d["log_perplexity"], d["log_perplexity_standard_error"]) for d in same} == {(0, 0)}
    # A protocol that the first model does not have keeps its row, without a difference.
    only = tmp_path / "only.json"
    only.write_text(json.dumps(results[0]["lambada"]))
    mlm_eval("compare", only, kept[1], "--csv", table, ends=0)
    with table.open() as file:
        shown = {(row["task"], bool(row["pairs"])) for row in csv.DictReader(file)}
    assert shown == {(task, False) for task in results[1]} | {("lambada", True)}
    other = json.loads(kept[1].read_text())["results"]["wikitext103"] | {
        "tokenizer_digest": "other"
    }
    kept[1].write_text(json.dumps(other))
    assert "not scored on the same parts" in mlm_eval("compare", *kept, ends=2).error
    kept[1].write_text("{}")
    assert "holds no results" in mlm_eval("compare", *kept, ends=2).error
    assert "two or more files" in mlm_eval("compare", kept[0], ends=2).error


def test_a_user_s_own_text(run: Path, tmp_path: Path, evaluated: Evaluated) -> None:
    text, lines = tmp_path / "mine.txt", tmp_path / "mine.jsonl"
    documents = sentences(6)
    text.write_text("\n\n".join(documents))
    lines.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    whole = evaluated("perplexity", text, "--ckpt", run)
    parts = evaluated("perplexity", lines, "--ckpt", run)
    assert whole["perplexity"] == parts["perplexity"]
    assert len(parts["blocks"]) == 6
    assert [block["num_targets"] for block in whole["blocks"]][:-1] == [64] * (
        len(whole["blocks"]) - 1
    )
    assert (
        sum(b["num_targets"] for b in parts["blocks"])
        == whole["num_scored_tokens"]
        == whole["num_tokens"] - 1
    )

    text.write_text("\n".join(documents))
    cloze = evaluated("cloze", text, "--ckpt", run)
    assert (cloze["task"], cloze["num_examples"]) == ("cloze", 6)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "not UTF-8"),
        (b"one", "no words before its last"),
        (b"", "has no text"),
        (b" \n", "no passage"),
    ],
)
def test_a_text_that_cannot_be_used(
    content: bytes | None, words: str, run: Path, tmp_path: Path, mlm_eval: Command
) -> None:
    path = tmp_path / "mine.txt"
    if content is not None:
        path.write_bytes(content)
    done = mlm_eval("cloze", path, "--ckpt", run, ends=2)
    assert words in done.err


def test_an_exported_directory_gives_our_checkpoint_s_number(
    run: Path, made_passes_for_published: RunningText, tmp_path: Path, evaluated: Evaluated
) -> None:
    theirs = export_checkpoint(run, tmp_path / "theirs")
    results = [evaluated("wikitext103", "--ckpt", path, "--limit", 6) for path in (run, theirs)]
    assert results[0]["perplexity"] == results[1]["perplexity"]
    assert [result["checkpoint"] for result in results] == [f"{run.name}/iter_0000010", "theirs"]
    assert results[0]["kind"] == results[1]["kind"] == "scaled"
    again = evaluated("wikitext103", "--ckpt", theirs, "--limit", 6)
    assert again["checkpoint_digest"] == results[1]["checkpoint_digest"]


def test_list_names_every_protocol(mlm_eval: Command) -> None:
    done = mlm_eval("list", ends=0)
    assert [line.split()[0] for line in done.out.splitlines()] == list(TASKS)


def test_all_without_the_files_says_what_was_not_run(
    tmp_path: Path, nothing_published: Path, mlm_eval: Command
) -> None:
    run, target = write_run(tmp_path / "runs"), tmp_path / "all.json"
    done = mlm_eval("all", "--ckpt", run, "--limit", 3, "--json", target, "--set", "workers=1")
    found = json.loads(target.read_text())
    assert [result["task"] for result in found["results"].values()] == [
        "heldout-perplexity",
        "heldout-cloze",
    ]
    assert found["missing"].keys() == TASKS.keys() - {"wikitext103", "lambada"}
    assert "NOT RUN" in done.out


def test_a_megatron_checkpoint_with_its_vocabulary(tmp_path: Path, evaluated: Evaluated) -> None:
    model = write_rough(tmp_path / "rough")
    save(tmp_path / "megatron", model, version=3)
    vocab = export_checkpoint(tmp_path / "rough", tmp_path / "exported")
    text = tmp_path / "mine.txt"
    text.write_text(" ".join(sentences(3)))
    native = import_checkpoint(tmp_path / "megatron", tmp_path / "native", vocab)
    direct = evaluated(
        "perplexity", text, "--ckpt", tmp_path / "megatron", "--set", f"vocab={vocab}"
    )
    ours = evaluated("perplexity", text, "--ckpt", native)
    assert direct["perplexity"] == ours["perplexity"]
    assert (direct["checkpoint"], direct["checkpoint_digest"]) == (
        "megatron",
        ours["checkpoint_digest"],
    )
