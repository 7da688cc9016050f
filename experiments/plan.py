"""What a reproduction would run on this machine, and what that costs. Imports no torch."""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_pipeline.config import DataConfig
from data_pipeline.reading.file_sources import FileSource
from engine.cli import read_run_config
from engine.config import RunConfig
from engine.costs import checkpoint_bytes, flops_per_iteration, parameter_count, rank_memory_bytes, tokens_trained
from engine.launch import default_ranks
from lineage.config import load_config
from lineage.environment import available_cores, list_gpus
from lineage.errors import BadInput, HardwareMissing
from lineage.progress import format_duration

HERE = Path(__file__).parent
RECIPES = HERE.parent / "data_pipeline" / "recipes"
FULL_RECIPE = RECIPES / "available-2019.toml"
LADDER = ("355m", "2.5b", "8.3b")
"""The models of the 2019 paper's Figure 6 and Table 3."""

TRAINING_EFFICIENCY = 0.45
"""Share of the measured matrix rate that a training iteration of a twin reaches; only for the estimate of minutes."""
DATA_BYTES_PER_CORE_SECOND = 0.22e6
"""Text one core takes through the data pipeline in a second; only for the estimate of minutes."""
SOURCE_BYTES = {"wikipedia": 20e9, "openwebtext": 38e9, "realnews": 120e9, "cc-stories": 31e9, "installed-docs": 100e6}
"""Rough size of the text of sources that are not files; only for the estimate of minutes and disk."""
FULL_EFFICIENCY_FLOPS = 30e12
"""Floating-point operations per second and GPU in the 2019 paper's runs; only for the estimate of days."""


@dataclass(frozen=True)
class Size:
    """How much of a scaled reproduction is run."""

    name: str
    recipe: Path
    suffix: str
    overrides: tuple[str, ...]
    windows: int
    """WikiText-103 windows scored for each model."""
    examples: int
    """LAMBADA examples scored for each model."""


TWIN = Size("twin", RECIPES / "twin.toml", "twin", (), windows=5_000, examples=5153)
SMOKE = Size(
    "smoke",
    RECIPES / "smoke.toml",
    "smoke",
    (
        "train.iterations=12",
        "train.warmup_iterations=1",
        "train.validation_interval=4",
        "train.validation_samples=32",
        "train.checkpoint_interval=6",
        "train.global_batch_size=4",
        "train.microbatch_size=2",
    ),
    windows=100,
    examples=100,
)


@dataclass(frozen=True)
class Plan:
    """A reproduction, decided."""

    target: str
    mode: str
    reason: str
    recipe: Path
    size: Size | None
    """None in full mode."""
    published: tuple[RunConfig, ...]
    """The published recipes up to the target, smallest first."""
    configs: tuple[RunConfig, ...]
    """What is run for each of them: the recipe itself or its twin."""

    def overrides(self, config: RunConfig) -> list[str]:
        """The overrides under which `mlm-train` runs one of `configs`."""
        return [f"name={config.name}", *self.size.overrides] if self.size else []


def make_plan(target: str, mode: str, smoke: bool, recipe: Path | None) -> Plan:
    """Decide between the full size and twins by looking at the hardware.

    Raises HardwareMissing when full size is asked for on a machine that cannot, BadInput when it is asked for
    together with the smallest size.
    """
    if smoke and mode == "full":
        raise BadInput("--smoke is a size of twins; it does not go with --mode full")
    names = LADDER[: LADDER.index(target) + 1]
    published = tuple(read_run_config(model_file(name)) for name in names)
    possible, reason = _fits(published[-1])
    if mode == "full" and not possible:
        raise HardwareMissing(f"the full size cannot run here: {reason}")
    if mode == "full" or (mode == "auto" and possible and not smoke):
        return Plan(target, "full", reason, recipe or FULL_RECIPE, None, published, published)
    size = SMOKE if smoke else TWIN
    why = "asked for" if mode == "scaled" or smoke else reason
    configs = tuple(
        read_run_config(model_file(name), [f"name={name}-{size.suffix}", *size.overrides], twin=True) for name in names
    )
    return Plan(target, "scaled", why, recipe or size.recipe, size, published, configs)


def model_file(name: str) -> Path:
    """The published recipe of a model."""
    return HERE / "models" / f"{name}.toml"


def _fits(config: RunConfig) -> tuple[bool, str]:
    gpus, tp = list_gpus(), config.parallel.tp
    needed = sum(rank_memory_bytes(config.model, config.train, config.parallel).values())
    wanted = f"{config.name} needs {tp} GPU{'s' if tp > 1 else ''} of {needed / 2**30:.0f} GiB"
    if not gpus:
        return False, f"there is no GPU, and {wanted}"
    if len(gpus) < tp:
        return False, f"there are {len(gpus)} GPUs, and {wanted}"
    smallest = min(gpu["memory_bytes"] for gpu in gpus)
    if smallest < needed:
        return False, f"the GPUs have {smallest / 2**30:.0f} GiB, and {wanted}"
    return True, f"{wanted}; there are {len(gpus)} of {smallest / 2**30:.0f} GiB"


def print_plan(plan: Plan) -> None:
    """Mode and reason, then the cost of each model: parameters, tokens, FLOPs, disk, expected time."""
    print(f"mode: {plan.mode} ({plan.reason})")
    if plan.size and plan.configs[0].twin:
        print(plan.configs[0].twin.sentence())
    print(f"{'model':<12}{'parameters':>15}{'tokens':>18}{'FLOPs':>11}{'disk':>10}{'expected':>12}")
    text_bytes = _text_bytes(plan.recipe)
    data_seconds = 5.0 + text_bytes / (DATA_BYTES_PER_CORE_SECOND * available_cores())
    total_seconds, total_bytes = data_seconds, 6.0 * text_bytes
    for config in plan.configs:
        seconds, disk = _training_seconds(plan, config), _training_bytes(config)
        total_seconds, total_bytes = total_seconds + seconds, total_bytes + disk
        print(
            f"{config.name:<12}{parameter_count(config.model):>15,}{tokens_trained(config.model, config.train):>18,}"
            f"{flops_per_iteration(config.model, config.train) * config.train.iterations:>11.2e}"
            f"{disk / 1e9:>7.2f} GB{_duration(seconds):>12}"
        )
    print(f"data: {plan.recipe.stem} recipe, expected {_duration(data_seconds)}")
    print(f"in all: about {_duration(total_seconds)} and {total_bytes / 1e9:.2f} GB of disk", flush=True)


def _training_seconds(plan: Plan, config: RunConfig) -> float:
    flops = flops_per_iteration(config.model, config.train) * config.train.iterations
    if plan.size is None:
        return flops / (FULL_EFFICIENCY_FLOPS * max(len(list_gpus()), 1))
    start_up_seconds = 5.0
    return start_up_seconds + flops / (matrix_flops_per_second() * TRAINING_EFFICIENCY * default_ranks(config))


def _training_bytes(config: RunConfig) -> float:
    return float(config.train.keep_checkpoints * checkpoint_bytes(config.model, config.train.precision))


def _text_bytes(recipe: Path) -> float:
    sources = load_config(recipe, DataConfig).sources
    return sum(min(_source_bytes(name), sources.max_bytes or float("inf")) for name in sources.names)


def _source_bytes(name: str) -> float:
    if name in SOURCE_BYTES:
        return SOURCE_BYTES[name]
    return float(sum(path.stat().st_size for _, path in FileSource(name).files))


def _duration(seconds: float) -> str:
    return f"{seconds / 86400:,.1f} days" if seconds > 2 * 86400 else format_duration(seconds)


def matrix_flops_per_second() -> float:
    """Best of a few 512 × 512 fp32 matrix products on the calling thread's cores, divided by the cores."""
    a = np.ones((512, 512), np.float32)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * 512**3 / best / available_cores()
