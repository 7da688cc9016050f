"""The tables of the page on LAMB's trust ratio, from its formula and from the kept ablation."""

import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from docs.hooks.commands import table
from mlm_repro.engine.config import TrainConfig
from mlm_repro.experiments.catalogue import Effect
from mlm_repro.experiments.forecast.ablation import derive_effects
from mlm_repro.experiments.scores import found

STEPS = (1, 3, 10, 30, 100, 300, 1000, 3000)
PAIRS = (
    ("outside, gradients × 1024", "outside"),
    ("outside, warm-up, gradients × 1024", "outside, warm-up"),
    ("none, gradients × 1024", "none"),
    ("none, warm-up, gradients × 1024", "none, warm-up"),
    ("outside", "outside, warm-up"),
    ("none", "none, warm-up"),
)
"""Pairs of names of arms that are compared, seed by seed: the first's loss less the second's."""


def correction() -> str:
    """Return as text a Markdown table with a column for each step t of `STEPS` and one row:
    c(t) = √(1 − β₂ᵗ) / (1 − β₁ᵗ), the factor on the rate in the code of the post "Scaling
    Transformer-XL to 128 GPUs", with the default betas of a training."""
    first = TrainConfig().adam_beta1
    second = TrainConfig().adam_beta2
    values = (math.sqrt(1 - second**step) / (1 - first**step) for step in STEPS)
    return table(("t", *map(str, STEPS)), [("c(t)", *(f"{value:.2f}" for value in values))])


def arms(results: Path) -> str:
    """Return as one text two Markdown tables of the kept ablation
    transformer-xl-trust-ratio-effects: each arm's rate and its losses, means over the seeds, early
    in training and at the end; and, at both, the differences of the pairs of arms in `PAIRS`,
    paired by seed, with 95 % intervals. `results` is the folder of kept results; the ablation must
    have exactly one run there. Raises what `derive_effects` raises."""
    (run,) = results.glob("ablations/experiment-transformer-xl-trust-ratio-effects-*")
    _, records = derive_effects(run)
    tokens = sorted({record.x for record in records if record.x is not None})
    early = defaultdict(list)
    end = defaultdict(list)
    rates = {}
    for record in records:
        if record.quantity == "validation_loss" and record.x == tokens[1]:
            early[record.series].append(record.value)
        elif record.quantity == "final_validation_loss":
            end[record.series].append(record.value)
        elif record.quantity == "learning_rate":
            rates[record.series] = f"{record.value:g}"
    means = [
        (name, rates[name], f"{fmean(early[name]):.3f}", f"{fmean(end[name]):.3f}") for name in end
    ]
    rows = []
    for first, less in PAIRS:
        effect = Effect(claim="", of=first, less=less, above=0.0)
        cells = []
        for losses in (early, end):
            differences = [
                loss - other for loss, other in zip(losses[first], losses[less], strict=True)
            ]
            record = found(
                effect, 0.95, differences, {"experiment": "", "source": "", "kind": "scaled"}
            ).record
            cells.append(f"{record.value:+.4f} ({record.low:+.4f} to {record.high:+.4f})")
        rows.append((f"{first} − {less}", *cells))
    ends = table(("correction, and what else", "rate", "loss after 5 %", "loss at the end"), means)
    return f"{ends}\n\n{table(('paired differences, nats', 'after 5 %', 'at the end'), rows)}"
