"""An ablation trains its arms alike but for what they change, and its records say which of them diverged."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.tokens.token_file import TokenFile, TokenFileWriter, token_dtype
from data_pipeline.tokens.tokenizer import Tokenizer, padded_vocab_size
from experiments.catalogue import Arm, Experiment, find_experiment, load_experiments
from experiments.measured.ablations import configure, format_ablation, length_adjusted_perplexity, run_ablation
from experiments.verdicts import load_results
from lineage.digest import seal
from lineage.errors import BadInput
from tests.engine.conftest import write_dataset

ABLATIONS = {name: one for name, one in load_experiments().items() if one.ablation}


def shrunk(name: str, iterations: int, **changed: Any) -> Experiment:
    """A shipped experiment that trains so few iterations of four samples with one seed, `changed` in its ablation."""
    experiment = find_experiment(name)
    assert experiment.ablation is not None
    small = {"iterations": iterations, "global_batch_size": 4, "microbatch_size": 4, "warmup_iterations": 0}
    train = experiment.ablation.train | small | changed.pop("train", {})
    ablation = experiment.ablation.model_copy(update={"train": train, "seeds": (1,)} | changed)
    return experiment.model_copy(update={"ablation": ablation})


@pytest.mark.parametrize("name", ABLATIONS)
def test_arms_differ_in_what_they_change_alone(name: str, tmp_path: Path) -> None:
    experiment = ABLATIONS[name]
    assert experiment.ablation is not None
    assert len(experiment.ablation.seeds) >= 2
    plain = configure(experiment, Arm(name="plain"), 1, tmp_path).model_dump(mode="json")
    for arm in experiment.ablation.arms:
        first, second = (configure(experiment, arm, seed, tmp_path) for seed in (1, 2))
        assert first.train.model_copy(update={"seed": 2}) == second.train
        described = first.model_dump(mode="json")
        for section, changed in (("model", arm.model), ("train", arm.train)):
            differing = {key for key, value in described[section].items() if plain[section][key] != value}
            assert differing <= changed.keys()


def test_a_result_tells_what_trained_from_what_diverged(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "words")
    arms = (Arm(name="trains"), Arm(name="diverges", train={"learning_rate": 1e6, "min_learning_rate": 1e6}))
    tiny = shrunk("transformer-xl/memory", 8, arms=arms)
    run, records = run_ablation(tiny, [dataset], tmp_path / "runs")
    assert {one.series: one.value for one in records if one.quantity == "diverged"} == {"trains": 0, "diverges": 1}
    curve = [one for one in records if (one.series, one.quantity) == ("trains", "training_loss")]
    assert [one.x for one in curve] == list(range(1, 9))
    assert {(one.kind, one.seed) for one in records} == {("scaled", 1)}
    assert list(load_results([run.path]).records) == records
    assert format_ablation(tiny, records).splitlines()[1].startswith("trains")
    again, _ = run_ablation(tiny, [dataset], tmp_path / "runs")
    assert again.path == run.path


def test_an_experiment_without_an_ablation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="2019/figure-6 has no ablation; there are"):
        run_ablation(find_experiment("2019/figure-6"), [tmp_path], tmp_path)


def write_words(directory: Path, of_bytes: Path) -> Path:
    """The random sentences of a dataset again, in whole words."""
    tokenizer = Tokenizer.load(of_bytes / "tokenizer")
    cards = {}
    splits = {}
    for split in ("train", "valid"):
        file = TokenFile(of_bytes / f"{split}_text_document")
        stops = [0, *np.cumsum(file.sizes).tolist()]
        splits[split] = [tokenizer.decode(file.tokens[a : b - 1].tolist()) for a, b in pairwise(stops)]
    words = Tokenizer.of_words(splits["train"], 21)
    words.save(directory / "tokenizer")
    for split, texts in splits.items():
        with TokenFileWriter(directory / f"{split}_text_document", token_dtype(words.vocab_size)) as writer:
            for text in texts:
                writer.add_document([*words.encode(text), words.end_of_text])
    for path, kind, size in ((of_bytes, "train", tokenizer.vocab_size), (directory, "words", words.vocab_size)):
        sizes = {"vocab_size": size, "padded_vocab_size": padded_vocab_size(size)}
        cards[kind] = {"name": kind, "seed": 0, "tokenizer": {"kind": kind, "digest": ""}, **sizes, "splits": {
            split: {"prefix": f"{split}_text_document", "documents": len(texts), "bytes": len("".join(texts).encode()),
                    "tokens": len(TokenFile(path / f"{split}_text_document").tokens)}
            for split, texts in splits.items()
        }}  # fmt: skip
        (path / "dataset.json").write_text(json.dumps(cards[kind]), encoding="utf-8")
        seal(path)
    return directory


def test_vocabularies_are_compared_by_the_word(tmp_path: Path) -> None:
    of_bytes = write_dataset(tmp_path / "bytes")
    (of_bytes / "COMPLETE").unlink()
    of_words = write_words(tmp_path / "words", of_bytes)
    experiment = find_experiment("transformer-xl/tokens")
    assert experiment.ablation is not None
    bpe, words = experiment.ablation.arms
    words = words.model_copy(update={"model": {"transformer_xl": {"cutoffs": [5, 9], "div_value": 4}}})
    tiny = shrunk("transformer-xl/tokens", 4, arms=(bpe, words))
    _, records = run_ablation(tiny, [of_bytes, of_words], tmp_path / "runs")
    found = {(one.series, one.quantity): one.value for one in records if one.x is None}
    tokens, count = (len(TokenFile(path / "valid_text_document").tokens) for path in (of_bytes, of_words))
    loss = found["byte-pair encoding", "validation_loss"]
    assert found["byte-pair encoding", "sequence_length_percent"] == pytest.approx(100 * (tokens / count - 1))
    assert found["byte-pair encoding", "word_perplexity"] == pytest.approx(math.exp(loss * tokens / count))
    assert found["words, adaptive", "word_perplexity"] == pytest.approx(
        math.exp(found["words, adaptive", "validation_loss"])
    )
    with pytest.raises(BadInput, match="takes --dataset 2 times; it was given 1"):
        run_ablation(tiny, [of_bytes], tmp_path / "runs")
    with pytest.raises(BadInput, match="none of the datasets has a vocabulary of words"):
        run_ablation(tiny, [of_bytes, of_bytes], tmp_path / "runs")
    other = json.loads((of_bytes / "dataset.json").read_text(encoding="utf-8"))
    other["splits"]["valid"]["bytes"] += 1
    (of_bytes / "dataset.json").write_text(json.dumps(other), encoding="utf-8")
    with pytest.raises(BadInput, match="are not of the same text"):
        run_ablation(tiny, [of_bytes, of_words], tmp_path / "runs")


def test_rates_are_swept_and_the_finder_says_where_the_loss_is_lowest(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "words")
    swept = shrunk("transformer-xl/large-batch", 6, learning_rates=(1e-3, 1e5))
    _, records = run_ablation(swept, [dataset], tmp_path / "runs")
    lost = {(one.series, one.x): one.value for one in records if one.quantity == "diverged"}
    assert {key: value for key, value in lost.items() if key[0] == "Adam"} == {("Adam", 1e-3): 0, ("Adam", 1e5): 1}
    assert len(lost) == 4
    shown = [line.split() for line in format_ablation(swept, records).splitlines()]
    assert ["Adam", "diverged", "100000", "1", "scaled"] in shown
    found = shrunk("transformer-xl/learning-rate-finder", 12)
    _, records = run_ablation(found, [dataset], tmp_path / "runs")
    curve = [one.x for one in records if (one.series, one.quantity) == ("Adam", "smoothed_loss")]
    assert curve[0] == 1e-4
    assert all(1e-4 < one.value <= 1 for one in records if one.quantity == "lowest_loss_rate")
    assert "Adam" in format_ablation(found, records)


def test_data_parallel_arms_record_the_noise_scale_over_samples(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "words")
    arms = (Arm(name="growing", train={"rampup_batch_size": [4, 4, 8]}),)
    tiny = shrunk("transformer-xl/batch-scaling", 6, arms=arms, train={"global_batch_size": 8, "microbatch_size": 2})
    _, records = run_ablation(tiny, [dataset], tmp_path / "runs")
    places = [one.x for one in records if one.quantity == "noise_scale"]
    assert places
    assert {*places} <= {4, 8, 16, 24, 32, 40}
    assert {one.x_name for one in records if one.x is not None} == {"samples"}


def test_the_posts_example_of_length_adjustment() -> None:
    assert length_adjusted_perplexity(26.25, 1950, 1699) == pytest.approx(42.5, abs=0.1)


@given(perplexity=st.floats(1, 1e4), tokens=st.integers(1, 10**6), words=st.integers(1, 10**6))
def test_a_text_adjusted_there_and_back_stays_as_likely(perplexity: float, tokens: int, words: int) -> None:
    if tokens <= 10 * words:
        there = length_adjusted_perplexity(perplexity, tokens, words)
        assert length_adjusted_perplexity(there, words, tokens) == pytest.approx(perplexity, rel=1e-9)


@pytest.mark.parametrize("values", [(0.5, 1, 1), (2.0, 0, 1), (2.0, 1, -1), (float("nan"), 1, 1)])
def test_impossible_perplexities_are_refused(values: tuple[float, float, float]) -> None:
    with pytest.raises(BadInput, match="is impossible"):
        length_adjusted_perplexity(*values)
