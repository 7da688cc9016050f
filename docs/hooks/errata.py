"""The page of errata, written from experiments/claims/errata.toml."""

from collections.abc import Iterator

from docs.hooks.commands import cell, table
from mlm_repro.experiments.catalogue import read_errata

HEADS = ("document, place", "printed", "follows from it", "class")


def errata() -> Iterator[str]:
    """A table of all, then each with its quotations, and what looks like one and is none."""
    every = [*enumerate(read_errata().errata, 1)]
    yield table(
        ("", *HEADS),
        [
            (
                str(number),
                *map(cell, (f"{one.document}, {one.place}", one.printed, one.follows, one.kind)),
            )
            for number, one in every
        ],
    )
    for number, one in every:
        yield f"## {number} {one.title}"
        yield f"{one.document}. Class: {one.kind}."
        yield from (f"> {each.words}\n>\n> — {each.place}" for each in one.quotations)
        yield f"**Printed**: {one.printed}. **Follows**: {one.follows}. Formula: {one.formula}."
        yield one.text.strip()
        yield f"Found {one.found}. Answered: {one.answered}."
        yield f"```sh\n{one.command}\n```"
    yield "## What looks like an erratum and is none"
    for each in read_errata().cleared:
        yield f"> {each.words}\n>\n> — {each.place}"
        yield each.reason
