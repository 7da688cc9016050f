"""The page of errata, written from experiments/claims/errata.toml."""

from collections.abc import Iterator

from docs.hooks.commands import cell, table
from mlm_repro.experiments.catalogue import read_errata

HEADS = ("document, place", "printed", "follows from it", "class")


def errata() -> Iterator[str]:
    """Yield the parts of the page of errata as Markdown texts, from errata.toml: a table of all
    errata, then for each erratum a heading, quotations, formula, text and command, then the
    suspects that proved to be right."""
    every = [*enumerate(read_errata().errata, 1)]
    yield table(
        ("", *HEADS),
        [
            (
                str(number),
                *map(
                    cell,
                    (
                        f"{erratum.document}, {erratum.place}",
                        erratum.printed,
                        erratum.follows,
                        erratum.kind,
                    ),
                ),
            )
            for number, erratum in every
        ],
    )
    for number, erratum in every:
        yield f"## {number} {erratum.title}"
        yield f"{erratum.document}. Class: {erratum.kind}."
        yield from (f"> {each.words}\n>\n> — {each.place}" for each in erratum.quotations)
        yield (
            f"**Printed**: {erratum.printed}. **Follows**: {erratum.follows}."
            f" Formula: {erratum.formula}."
        )
        yield erratum.text.strip()
        yield f"Found {erratum.found}. Answered: {erratum.answered}."
        yield f"```sh\n{erratum.command}\n```"
    yield "## Suspected and cleared"
    for each in read_errata().cleared:
        yield f"> {each.words}\n>\n> — {each.place}"
        yield each.reason
