"""Small controlled comparisons: the same training but for one thing, over several seeds.

Each is a paper's claim at a size a laptop trains in minutes, defined in its experiment.toml. Every arm of a seed starts
from the same initial values and sees the same tokens in the same order.
"""

import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from data_pipeline.tokens.token_file import TokenFile
from data_pipeline.tokens.tokenizer import UNKNOWN_ID
from engine.config import RunConfig
from engine.launch.forked import run_forked
from engine.lr_finder import find_learning_rate
from engine.run.directory import begin_run, read_steps, read_validations
from engine.step import NotFinite
from engine.train import train
from experiments.catalogue import Ablation, Arm, Experiment, load_experiments
from experiments.sealed import Line, format_records, lines, seal_numbers
from lineage.config import parse_config
from lineage.data_files import DataCard
from lineage.errors import BadInput
from lineage.files import Step, read_document
from lineage.progress import announce
from lineage.records import Record
from lineage.run import RunDirectory

CURVE_POINTS = 20
"""Blocks of iterations that a training loss is averaged over."""
ENDS = ("validation_loss", "diverged", "lowest_loss_rate")
"""Quantities that are printed; the others are curves."""


class Trained(NamedTuple):
    """What came of one arm with one seed."""

    arm: Arm
    seed: int
    learning_rate: float | None
    """Where several are tried."""
    run: RunDirectory
    steps: Sequence[Step]
    """As far as it got."""
    validation_loss: float | None
    """At the end; None where the loss stopped being a number."""
    untrained_loss: float

    @property
    def is_diverged(self) -> bool:
        """Whether the loss stopped being a number or ended above that of an untrained model."""
        return self.validation_loss is None or self.validation_loss > self.untrained_loss


class WordLength(NamedTuple):
    """A validation split in two vocabularies."""

    tokens: int
    """In the dataset's own."""
    words: int
    unknown: float
    """Share of its tokens that stand for any word outside the vocabulary."""


def run_ablation(experiment: Experiment, datasets: Sequence[Path], runs: Path) -> tuple[RunDirectory, list[Record]]:
    """Train every arm with every seed below `runs`; a sealed run of what came of them, with its records.

    Raises BadInput for an experiment without an ablation, and where datasets are too few, too many or of other text.
    """
    ablation = ablation_of(experiment)
    needed = 1 + max(arm.dataset for arm in ablation.arms)
    if len(datasets) != needed:
        raise BadInput(f"{experiment.name} takes --dataset {needed} times; it was given {len(datasets)}")
    lengths = word_lengths(datasets) if needed > 1 else []
    trainings = len(ablation.arms) * len(ablation.seeds) * len(ablation.learning_rates or (None,))
    announce(f"{trainings} trainings on {ablation.ranks} ranks, each with its own cost below")
    if ablation.finder:
        return seal_numbers(experiment, "", _sweeps(experiment, ablation.finder, datasets[0]), runs)
    trained = [
        _train(experiment, arm, seed, datasets[arm.dataset], rate, runs)
        for seed in ablation.seeds
        for arm in ablation.arms
        for rate in ablation.learning_rates or (None,)
    ]
    numbers = [line for each in trained for line in _numbers(each)]
    numbers += [line for each in trained if lengths for line in _numbers_per_word(each, lengths[each.arm.dataset])]
    parents = {each.run.path.name: each.run.digest for each in trained if each.run.is_complete}
    return seal_numbers(experiment, "", numbers, runs, parents)


def ablation_of(experiment: Experiment) -> Ablation:
    """Its ablation. Raises BadInput where there is none."""
    if experiment.ablation is None:
        names = ", ".join(other.name for other in load_experiments().values() if other.ablation)
        raise BadInput(f"{experiment.name} has no ablation; there are {names}")
    return experiment.ablation


def configure(experiment: Experiment, arm: Arm, seed: int, dataset: Path, rate: float | None = None) -> RunConfig:
    """One arm's run, at one constant learning rate if given."""
    ablation = ablation_of(experiment)
    name = f"{_slug(experiment.name)}-{_slug(arm.name)}-{seed}"
    rates = {} if rate is None else {"learning_rate": rate, "min_learning_rate": rate}
    values = {
        "name": name if rate is None else f"{name}-{rate:g}",
        "model": {**ablation.model, **arm.model},
        "train": {**ablation.train, **arm.train, **rates, "seed": seed},
        "data": {"dataset": str(dataset)},
        "record": {"noise_scale": ablation.ranks > 1},
    }
    return parse_config(values, RunConfig, f"ablation {experiment.name}")


def format_ablation(experiment: Experiment, records: Sequence[Record]) -> str:
    """What came of each arm at the end, by seed, at each learning rate if there are several, as text."""
    ends = [record for record in records if record.quantity in ENDS]
    return f"{ablation_of(experiment).question}\n{format_records(ends)}"


def _train(experiment: Experiment, arm: Arm, seed: int, dataset: Path, rate: float | None, runs: Path) -> Trained:
    config, ranks = configure(experiment, arm, seed, dataset, rate), ablation_of(experiment).ranks
    if ranks == 1:
        is_number = _finishes(config, runs)
    else:
        is_number = run_forked(_finishes, ranks, config, runs, timeout_seconds=3600.0)[0]
    run = begin_run(config, runs)[2]
    validations = read_validations(run.path)
    final = validations[-1].loss if is_number else None
    return Trained(arm, seed, rate, run, read_steps(run.path), final, validations[0].loss)


def _finishes(config: RunConfig, runs: Path) -> bool:
    """Train; whether the loss stayed a number."""
    try:
        train(config, runs)
    except NotFinite:
        return False
    return True


def _sweeps(experiment: Experiment, ends: tuple[float, float], dataset: Path) -> list[Line]:
    """Records of every arm's learning-rate finder: the smoothed loss over the rate, and where it is lowest."""
    found: list[Line] = []
    ablation = ablation_of(experiment)
    for seed in ablation.seeds:
        for arm in ablation.arms:
            config = configure(experiment, arm, seed, dataset)
            curve = find_learning_rate(config, *ends, config.train.iterations)
            for rate, loss in zip(curve.rates, curve.smoothed, strict=True):
                found += lines(arm.name, {"smoothed_loss": loss}, "scaled", seed=seed, x=rate, x_name="learning_rate")
            if curve.lowest_rate is not None:
                found += lines(arm.name, {"lowest_loss_rate": curve.lowest_rate}, "scaled", seed=seed)
    return found


def _numbers(trained: Trained) -> list[Line]:
    """Records of the loss at the end, and whether it diverged; where several learning rates are tried over these, with
    the highest loss on the way, otherwise with the loss in blocks of iterations, or the noise scale where it is known.
    """
    line = partial(lines, trained.arm.name, kind="scaled", seed=trained.seed)
    ends = {} if trained.validation_loss is None else {"validation_loss": trained.validation_loss}
    ends["diverged"] = float(trained.is_diverged)
    if (rate := trained.learning_rate) is not None:
        highest = {"highest_training_loss": max((step.loss for step in trained.steps), default=trained.untrained_loss)}
        return line(values=highest | ends, x=rate, x_name="learning_rate")
    name, x_name = "noise_scale", "samples"
    points = [(step.samples or 0, step.noise_scale) for step in trained.steps if name in step.model_fields_set]
    if not points:
        name, x_name = "training_loss", "iteration"
        points = [(step.iteration, step.loss) for step in trained.steps]
    curve = [each for x, y in _curve(points) for each in line(values={name: y}, x=x, x_name=x_name)]
    return curve + line(values=ends)


def _curve(points: Sequence[tuple[int, float | None]]) -> list[tuple[float, float]]:
    """Means of blocks of points without those that are None, each where its block ends."""
    block = max(len(points) // CURVE_POINTS, 1)
    parts = [points[start : start + block] for start in range(0, len(points), block)]
    known = [(float(part[-1][0]), [y for _, y in part if y is not None]) for part in parts]
    return [(x, fmean(values)) for x, values in known if values]


def word_lengths(datasets: Sequence[Path]) -> list[WordLength]:
    """How long each dataset's validation split is in its own tokens and in the words of the one that has words.

    Raises BadInput unless all are of the same text and one has a vocabulary of words.
    """
    cards = [read_document(path / "dataset.json", DataCard) for path in datasets]
    texts = {tuple((name, split.documents, split.bytes) for name, split in card.splits.items()) for card in cards}
    if len(texts) > 1:
        raise BadInput(f"{' and '.join(map(str, datasets))} are not of the same text")
    of_words = [place for place, card in enumerate(cards) if card.tokenizer.kind == "words"]
    if not of_words:
        raise BadInput("none of the datasets has a vocabulary of words: make one with tokenizer.kind = words")
    words = TokenFile(datasets[of_words[0]] / "valid_text_document").tokens
    unknown = float((words == UNKNOWN_ID).mean())
    return [
        WordLength(card.splits["valid"].tokens, len(words), unknown if place in of_words else 0.0)
        for place, card in enumerate(cards)
    ]


def _numbers_per_word(trained: Trained, length: WordLength) -> list[Line]:
    """Records of perplexity per token and, adjusted for length, per word; how much longer the text is than in words."""
    line = partial(lines, trained.arm.name, kind="scaled", seed=trained.seed)
    percent = 100 * (length.tokens / length.words - 1)
    numbers = line(values={"sequence_length_percent": percent}, unit="%") if percent else []
    if trained.validation_loss is not None:
        perplexity = math.exp(trained.validation_loss)
        numbers += line(values={"bpe_perplexity": perplexity}) if percent else []
        note = f"{length.unknown:.1%} of the words are unknown and count as one word" if length.unknown else ""
        adjusted = length_adjusted_perplexity(perplexity, length.tokens, length.words)
        numbers += line(values={"word_perplexity": adjusted}, note=note)
    return numbers


def length_adjusted_perplexity(perplexity: float, num_tokens: float, num_words: float) -> float:
    """The perplexity per word of a model whose perplexity per token is given: exp(ln ppl · T_tokens / T_words).

    "Scaling Transformer-XL to 128 GPUs" turns 26.25 per BPE token into 42.5 per word with 1950 / 1699. Raises BadInput
    for a perplexity below 1 or counts that are not above 0.
    """
    if not (perplexity >= 1 and num_tokens > 0 and num_words > 0):
        raise BadInput(f"a perplexity of {perplexity} over {num_tokens} tokens and {num_words} words is impossible")
    return math.exp(math.log(perplexity) * num_tokens / num_words)


def _slug(name: str) -> str:
    return re.sub(r"[^\w.]+", "-", name)
