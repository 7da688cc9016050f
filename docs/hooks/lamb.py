"""The tables of the page on LAMB's trust ratio, from its formula and from the kept ablation."""

import math
from pathlib import Path
from statistics import fmean

from docs.hooks.commands import table
from mlm_repro.engine.config import TrainConfig
from mlm_repro.experiments.forecast.ablation import derive_effects

STEPS = (1, 3, 10, 30, 100, 300, 1000, 3000)


def correction() -> str:
    """The correction on the rate in the post's code, at some steps."""
    first, second = TrainConfig().adam_beta1, TrainConfig().adam_beta2
    values = (math.sqrt(1 - second**step) / (1 - first**step) for step in STEPS)
    return table(("t", *map(str, STEPS)), [("c(t)", *(f"{value:.2f}" for value in values))])


def arms(results: Path) -> str:
    """Mean validation losses of the arms at the twentieth of the training and at its end, and what the effects are."""
    (run,) = results.glob("ablations/experiment-transformer-xl-trust-ratio-effects-*")
    findings, records = derive_effects(run)
    curves: dict[str, dict[float, list[float]]] = {}
    for record in records:
        if record.quantity == "validation_loss":
            assert record.x is not None
            curves.setdefault(record.series, {}).setdefault(record.x, []).append(record.value)
    rows = [
        (name, *(f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})" for values in (early, end)))
        for name, curve in curves.items()
        for early, end in [(curve[sorted(curve)[1]], curve[max(curve)])]
    ]
    found = "\n".join(f"- {finding.effect.claim}: {finding.outcome}. {finding.sentence}." for finding in findings)
    return f"{table(('correction, and what else', 'loss after 5 %', 'loss at the end'), rows)}\n\n{found}"
