"""The page of the seeds: the documents that the project grew from, item by item, with commands and outcomes."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Literal, Self

from pydantic import model_validator

from docs.hooks.commands import cell, table
from docs.hooks.readme import KEPT, every_verdict
from docs.hooks.results import pretrained_rows
from mlm_repro.engine.costs import flops_per_token
from mlm_repro.evaluation.models.places import SMOLLM2
from mlm_repro.experiments.benchmark import read_benchmark
from mlm_repro.experiments.catalogue import Experiment, every_claim, load_experiments, matches
from mlm_repro.experiments.files import EXPERIMENTS
from mlm_repro.experiments.simulator.cluster import load_cluster
from mlm_repro.experiments.simulator.planner import OWN, ranked_layouts, read_model
from mlm_repro.experiments.verdicts import Verdict, count_outcomes
from mlm_repro.lineage.config import Config, load_config
from mlm_repro.lineage.records import RECORDS, read_records

ROWS = Path(__file__).with_suffix(".toml")


class Row(Config):
    """An item of a document."""

    item: str
    place: str
    """FILE or FILE:NAME."""
    command: str = ""
    claims: tuple[str, ...] = ()
    """Ids of published claims; `*` stands for any characters."""
    test: str = ""
    """Test that holds what needs no published number."""
    kept: Literal["", "pretrained", "interleaving", "bert-752m", "kernels", "relaunch"] = ""
    """Another result: scores of a pretrained model, executed schedules, what a training would cost, or benchmarks."""
    why: str = ""
    """Reason for which there is no outcome."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.claims or self.test or self.kept or self.why):
            raise ValueError(f"{self.item!r} has no claims, no test, no kept result and no reason")
        return self


class Seed(Config):
    """A document."""

    title: str
    rows: tuple[Row, ...]


class Seeds(Config):
    """seeds.toml."""

    seeds: tuple[Seed, ...]


def seeds() -> Iterator[str]:
    """A table for each document, its outcomes from what is kept and from what is simulated."""
    experiments = load_experiments()
    verdicts = every_verdict()
    scores = ", ".join(f"{protocol} {here}" for protocol, here, _ in pretrained_rows(KEPT / SMOLLM2))
    kept = {"": "", "pretrained": scores, "interleaving": _interleaved(), "bert-752m": _cost("bert-752m", 8)}
    kept |= {"kernels": "; ".join(_kernels()), "relaunch": _relaunch()}
    for seed in load_config(ROWS, Seeds).seeds:
        yield f"## {seed.title}"
        rows = []
        for row in seed.rows:
            spoken = [verdict for verdict in verdicts if matches(verdict.claim, row.claims)]
            makers = dict.fromkeys(verdict.experiment for verdict in spoken if verdict.experiment)
            commands = [row.command] if row.command else [_command(experiments[name]) for name in makers]
            if row.test and not commands:
                commands, held = [f"python -m pytest {row.test}"], "held by the suite"
            else:
                held = f"held by `{row.test.partition('::')[2]}`" if row.test else ""
            reasons = dict.fromkeys(filter(None, (row.why, *(one.reason for one in spoken if not one.experiment))))
            outcomes = filter(None, (_outcome(spoken), kept[row.kept], held, row.why if commands else ""))
            shown = ", ".join(f"`{one}`" for one in dict.fromkeys(commands)) or cell(f"none: {'; '.join(reasons)}")
            rows.append((cell(row.item), f"`{row.place}`", shown, "; ".join(outcomes)))
        yield table(("item", "where", "command", "outcome"), rows)


def _interleaved() -> str:
    """The interleaved schedule's gains at each number of microbatches: medians, and what all turns say of the claim."""
    every = read_records(KEPT / "ablations" / EXPERIMENTS / RECORDS)
    claim = next(each for each in every_claim() if each.id == "2021/text/interleaving-gain")
    values: dict[float | None, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    records = [each for each in every if (each.experiment, each.series) == ("2021/figure-12", "4 chunks")]
    for record in records:
        values[record.x][record.quantity].append(record.value)
    said = []
    for count, of in values.items():
        found = {claim.agrees(gain) for gain in of["gain_percent"]}
        outcome = "undecided" if len(found) > 1 else "confirmed" if found == {True} else "contradicted"
        gain, bubble, share = (
            median(of[name]) for name in ("gain_percent", "bubble_gain_percent", "communication_share")
        )
        said.append(f"{count:g}: {gain:+.0f} % ({bubble:.0f} % by the bubble; communication {share:.0%}), {outcome}")
    return f"at reduced scale ({records[-1].note}), 4 chunks over 1 by microbatches: {'; '.join(said)}"


def _kernels() -> Iterator[str]:
    """How many times faster the fused kernels are than their references, and attention on rows [s, b, h]."""
    for record in ("kernels", "gpu"):
        result = read_benchmark(KEPT / "bench" / f"{record}.json")
        where = ", ".join(result.environment.gpus) or result.environment.cpu
        for what, compared in (("fused kernels beside plain torch", "reference ÷ ours"),
                               ("[s, b, h] beside [b, s, h]", "[b, s, h] ÷ [s, b, h]")):  # fmt: skip
            times = [f"{case.name.replace('_', '-')} {ratio.value:.2f}" for case in result.cases
                     for ratio in case.ratios if ratio.name == compared]  # fmt: skip
            if times:
                yield f"{what} on {where}, times as fast: {', '.join(times)}"


def _relaunch() -> str:
    """The seconds from the call of a job to its first new iteration."""
    result = read_benchmark(KEPT / "bench" / "start.json")
    (ratio,) = (ratio for case in result.cases if case.name == "a job's relaunch" for ratio in case.ratios)
    spread = f"{min(ratio.rounds):.0f} to {max(ratio.rounds):.0f}"
    return (
        f"{ratio.value:.0f} s ({spread}) from the call to the first iteration of a relaunch on {result.environment.cpu}"
    )


def _cost(name: str, gpus: int) -> str:
    """Days of the whole training on H100 GPUs, simulated, and years by its operations at a processor's kept rate."""
    model, record = read_model(name), read_benchmark(KEPT / "bench" / "train-fp32.json")
    rates = [rate for case in record.cases for one in case.series if one.contender == "matrix products"
             for rate in one.samples]  # fmt: skip
    cores, rate = record.environment.cores or 1, median(rates)
    days = (
        ranked_layouts(model, load_cluster("h100", OWN), gpus)[0].prediction.seconds
        * model.config.train.iterations
        / 86400
    )
    years = flops_per_token(model.config.model) * model.tokens / (cores * rate * 1e9) / 86400 / 365
    return (
        f"the smallest published size that fails has {model.parameters / 1e6:.0f}M parameters, whose training takes "
        f"{days:.0f} days on {gpus} H100 GPUs (simulated: `mlm-experiment plan {name} --cluster h100 --gpus {gpus}`) "
        f"and {years:,.0f} years of products at {rate:.0f} GFLOP/s on each of {cores} cores of {record.environment.cpu}"
    )


def _command(experiment: Experiment) -> str:
    """The command that makes its numbers."""
    if experiment.reproduction:
        return f"mlm-experiment reproduce {experiment.reproduction}"
    verb, given = ("ablate", " --dataset DIR") if experiment.ablation else ("run", "")
    return f"mlm-experiment {verb} {experiment.name}{given}"


def _outcome(verdicts: list[Verdict]) -> str:
    """Counts of verdicts, and what those wait for that were not run."""
    needs = ", ".join(dict.fromkeys(verdict.needs for verdict in verdicts if verdict.needs not in ("", "nothing")))
    return (count_outcomes(verdicts) + (f"; needs {needs}" if needs else "")) if verdicts else ""
