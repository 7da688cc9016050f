"""Sizes, learning rates and length of a ladder, and what that costs on this machine. Imports no torch.

Sizes rise by about 1.8 in parameters without embeddings. A model has a layer for every 43 units of width, like the 355M
and the 8.3B model, and at least two. Every size but the largest is tried at the same learning rates for the same number
of iterations; one rule for all sizes is fitted to the trials (`experiments.forecast.ladder.rate_law`). There is no
dropout, and the rate is constant after its warm-up, so that one training gives the loss after any number of tokens.
"""

import heapq
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.config import DataSection, ModelConfig, RunConfig, TrainConfig
from engine.costs import parameter_count
from experiments.files import LadderPlan, RateLaw, RungPlan
from experiments.forecast.trainings import SEARCH_SEED
from experiments.reproduce.plan import initial_deviation
from lineage.errors import BadInput
from lineage.progress import format_duration


class Shape(NamedTuple):
    """A rung's layers, width and attention heads."""

    layers: int
    width: int
    heads: int


WIDTH_OF_A_LAYER = 1024 / 24
"""Width over layers of the 355M and 8.3B models."""
SHAPES = tuple(
    Shape(max(2, round(width / WIDTH_OF_A_LAYER)), width, heads)
    for width, heads in (
        (36, 2), (48, 3), (64, 4), (84, 4), (104, 4), (120, 5), (144, 6), (168, 7), (208, 8), (256, 8), (304, 8),
    )
)  # fmt: skip
FEWEST_RUNGS, MOST_RUNGS = 4, 7
SEQ_LENGTH, BATCH_SIZE = 128, 16
SEEDS = (1, 2, 3)
RATES = (0.002, 0.004, 0.008, 0.016)
SEARCH_SHARE = 0.2
"""Length of a trial over that of a training."""
TOKENS_PER_PARAMETER = 10
"""Least number of tokens for each parameter of the largest rung, embeddings included."""
MOST_EPOCHS = 4.0
USED = 0.92
"""Share of the budget that is planned; the rest is for other work of the machine."""
EVALUATION_TOKENS = 2e6
"""Training tokens that take as long as scoring a rung on the published texts, roughly."""
VALIDATIONS, VALIDATION_SAMPLES = 20, 512


def seconds_of(budget: str) -> float:
    """`90s`, `30m` or `2h` in seconds. Raises BadInput for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", budget)
    if not match:
        raise BadInput(f"invalid budget {budget!r}: use a time such as 30m or 2h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def rung_config(plan: LadderPlan, rung: int, seed: int, rate: float, dataset: Path = Path()) -> RunConfig:
    """One training of a rung at a constant learning rate; with `SEARCH_SEED` a shorter trial of the rate."""
    sizes, is_trial = plan.rungs[rung], seed == SEARCH_SEED
    count = plan.search_iterations if is_trial else plan.iterations
    return RunConfig(
        name=f"ladder-{sizes.layers}x{sizes.width}{'-trial' * is_trial}-rate-{rate:g}-seed-{seed}",
        model=rung_model(Shape(sizes.layers, sizes.width, sizes.heads)),
        train=TrainConfig(
            iterations=count,
            global_batch_size=plan.batch_size,
            microbatch_size=plan.batch_size // 2,
            learning_rate=rate,
            min_learning_rate=rate,
            warmup_iterations=max(plan.iterations // 50, 1),
            precision="fp32",
            seed=seed,
            validation_interval=count if is_trial else max(count // VALIDATIONS, 1),
            validation_samples=VALIDATION_SAMPLES,
            checkpoint_interval=max(count // 4, 1),
            keep_checkpoints=1,
        ),
        data=DataSection(dataset=dataset),
    )


def trial_configs(plan: LadderPlan, dataset: Path = Path()) -> dict[int, list[RunConfig]]:
    """The trials of every rung but the largest."""
    smaller = range(len(plan.rungs) - 1)
    return {rung: [rung_config(plan, rung, SEARCH_SEED, rate, dataset) for rate in plan.rates] for rung in smaller}


def whole_configs(
    plan: LadderPlan, rates: RateLaw, rung: int, seeds: Iterable[int], dataset: Path = Path()
) -> list[RunConfig]:
    """The trainings of a rung at the rate that the law gives."""
    rate = rates.at(plan.rungs[rung].parameters, plan.tokens)
    return [rung_config(plan, rung, seed, rate, dataset) for seed in seeds]


def rung_model(shape: Shape, vocabulary: int = 51200) -> ModelConfig:
    """The model of a shape; a dataset brings its own vocabulary."""
    return ModelConfig(
        num_layers=shape.layers,
        hidden_size=shape.width,
        num_heads=shape.heads,
        seq_length=SEQ_LENGTH,
        vocab_size=vocabulary,
        padded_vocab_size=vocabulary,
        dropout=0.0,
        init_std=initial_deviation(shape.width),
    )


def make_plan(
    budget_seconds: float, cores: int, seconds_per_token: Sequence[float], vocabulary: int, corpus_tokens: int,
    is_scored: bool,
) -> LadderPlan:  # fmt: skip
    """The largest ladder that the budget pays for, on as many tokens as it then pays for.

    `seconds_per_token` holds the speed of each of `SHAPES` on one core while all cores are busy; `is_scored` is true if
    the models are scored on published texts. Raises BadInput for a budget too small for four rungs, and for a corpus
    that would be read more than four times.
    """

    def plan_to(top: int, tokens: float) -> LadderPlan:
        """The ladder up to the shape `top`, on this many tokens or the fewest allowed."""
        places = range(max(0, top + 1 - MOST_RUNGS), top + 1)
        models = [rung_model(SHAPES[place], vocabulary) for place in places]
        counts = [parameter_count(model) for model in models]
        batch = BATCH_SIZE * SEQ_LENGTH
        iterations = VALIDATIONS * math.ceil(max(tokens, TOKENS_PER_PARAMETER * counts[-1]) / batch / VALIDATIONS)
        rungs = [
            RungPlan(**SHAPES[place]._asdict(), parameters=count,
                     inner_parameters=count - (vocabulary + SEQ_LENGTH) * model.hidden_size,
                     seconds=round(seconds_per_token[place] * iterations * batch, 1))
            for place, model, count in zip(places, models, counts, strict=True)
        ]  # fmt: skip
        *smaller, largest = (rung.seconds for rung in rungs)
        search = _side_by_side([SEARCH_SHARE * seconds for seconds in smaller for _ in RATES], cores)
        train = _side_by_side([seconds for seconds in smaller for _ in SEEDS], cores) + largest / (0.85 * cores)
        scored = sum(seconds_per_token[place] for place in places) * EVALUATION_TOKENS / cores if is_scored else 0.0
        return LadderPlan(
            budget_seconds=budget_seconds, cores=cores, rungs=rungs, iterations=iterations, batch_size=BATCH_SIZE,
            seq_length=SEQ_LENGTH, epochs=iterations * batch / corpus_tokens, seeds=list(SEEDS), rates=list(RATES),
            search_iterations=math.ceil(SEARCH_SHARE * iterations), expected_seconds=round(search + train + scored, 1),
        )  # fmt: skip

    for top in reversed(range(FEWEST_RUNGS - 1, len(SHAPES))):
        plan = plan_to(top, 0.0)
        if plan.expected_seconds <= USED * budget_seconds and plan.epochs <= MOST_EPOCHS:
            affordable = USED * budget_seconds * plan.tokens / plan.expected_seconds
            return plan_to(top, min(affordable, MOST_EPOCHS * corpus_tokens))
    if plan.expected_seconds <= USED * budget_seconds:
        raise BadInput(
            f"{corpus_tokens:,} tokens of training text are too few: {FEWEST_RUNGS} rungs would read them more than "
            f"{MOST_EPOCHS:g} times; name a larger recipe with --data"
        )
    raise BadInput(
        f"a budget of {format_duration(budget_seconds)} is too small for {FEWEST_RUNGS} rungs on {cores} cores: "
        f"the least is {format_duration(math.ceil(plan.expected_seconds / USED / 60) * 60)}"
    )


def describe_plan(plan: LadderPlan) -> str:
    """Sizes, tokens and time as text."""
    lines = [
        f"{'layers × width':<16}{'N (no embeddings)':>19}{'parameters':>13}{'tokens/parameter':>18}{'seconds':>10}"
    ]
    lines += [
        f"{f'{rung.layers} × {rung.width}':<16}{rung.inner_parameters:>19,}{rung.parameters:>13,}"
        f"{plan.tokens / rung.parameters:>18.1f}{rung.seconds:>10,.0f}"
        for rung in plan.rungs
    ]
    trained = len(plan.rungs) - 1
    return "\n".join([
        *lines,
        f"each on {plan.tokens:,} tokens, {plan.epochs:.2f} passes over the text; {len(plan.seeds)} seeds of all "
        f"but the largest, {len(plan.rates)} learning rates tried for {plan.search_iterations:,} iterations",
        f"the law is fitted to {trained} sizes"
        + ("" if trained >= MOST_RUNGS - 1 else "; a larger budget has more and a narrower interval"),
        f"expected: {format_duration(plan.expected_seconds)} on {plan.cores} cores",
    ])  # fmt: skip


def _side_by_side(seconds: Sequence[float], cores: int) -> float:
    """Time until the last training ends, if each takes the first free core, the longest first."""
    free = [0.0] * cores
    for each in sorted(seconds, reverse=True):
        heapq.heappush(free, heapq.heappop(free) + each)
    return max(free)
