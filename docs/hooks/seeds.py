"""The page of the seeds: the documents that the project grew from, item by item, with commands and outcomes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Self

from pydantic import model_validator

from docs.hooks.commands import cell, table
from docs.hooks.readme import every_verdict
from mlm_repro.experiments.catalogue import Experiment, load_experiments, matches
from mlm_repro.experiments.verdicts import Verdict, count_outcomes
from mlm_repro.lineage.config import Config, load_config

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
    kept: str = ""
    """Link to another result."""
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
            outcomes = filter(None, (_outcome(spoken), row.kept, held, row.why if commands else ""))
            shown = ", ".join(f"`{one}`" for one in dict.fromkeys(commands)) or cell(f"none: {'; '.join(reasons)}")
            rows.append((cell(row.item), f"`{row.place}`", shown, "; ".join(outcomes)))
        yield table(("item", "where", "command", "outcome"), rows)


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
