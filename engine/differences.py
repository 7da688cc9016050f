"""Differences between two configurations, grouped by consequence. Imports no torch."""

from collections.abc import Iterator

from engine.optim.schedule import learning_rate
from engine.run.resolved import ResolvedRun
from lineage.config import flatten

RECORDED = ("validation_", "checkpoint_", "keep_")
"""Prefixes of the keys of `train` that change what is recorded, not what is computed."""
MEANINGS = ("another model", "another training", "other data", "the same numbers but for rounding", "the same numbers")


def describe_differences(first: ResolvedRun, second: ResolvedRun) -> list[str]:
    """Lines to print: the differing keys under their meaning, then derived quantities."""
    keys = [flatten(run.config.model_dump(mode="json")) for run in (first, second)]
    groups: dict[str, list[str]] = {meaning: [] for meaning in MEANINGS}
    for key in sorted(keys[0].keys() | keys[1].keys()):
        before, after = (each.get(key) for each in keys)
        if before != after:
            groups[_meaning(key)].append(f"  {key}: {before} → {after}")
    lines = [line for meaning, group in groups.items() if group for line in (meaning, *group)]
    pairs = zip(_quantities(first), _quantities(second), strict=True)
    follows = [f"  {name}: {a:{form}} → {b:{form}}" for (name, form, a), (_, _, b) in pairs if a != b]
    return [*lines, *(["what follows", *follows] if follows else [])] or ["nothing differs"]


def _meaning(key: str) -> str:
    section, _, name = key.partition(".")
    if section == "train":
        return MEANINGS[4] if name.startswith(RECORDED) else MEANINGS[1]
    return {"model": MEANINGS[0], "data": MEANINGS[2], "parallel": MEANINGS[3]}.get(section, MEANINGS[4])


def _quantities(run: ResolvedRun) -> Iterator[tuple[str, str, float]]:
    model, train = run.config.model, run.config.train
    yield "parameters", ",", run.parameters
    yield "tokens trained", ",", run.tokens
    yield "FLOPs", ".3e", run.flops()
    yield "tokens of a whole batch", ",", train.global_batch_size * model.seq_length
    for part in (1, 2, 3, 4):
        iteration = max(1, train.iterations * part // 4)
        yield f"learning rate after {part}/4 of the training", ".3e", learning_rate(train, iteration)
