"""Every row of the page of the seeds has a place, a test and claims that are there; none is without
an outcome."""

import pytest

from docs.hooks.seeds import ROWS, seeds
from mlm_repro.experiments.catalogue import every_claim, matches
from mlm_repro.lineage.config import read_toml
from tests.architecture.rooms import ROOT
from tests.architecture.test_where_is_what import names_in

ALL = {row["item"]: row for seed in read_toml(ROWS)["seeds"] for row in seed["rows"]}
KEYS = {"item", "place", "command", "claims", "test", "kept", "why"}


@pytest.mark.parametrize("item", ALL)
def test_what_a_row_names_is_there(item: str) -> None:
    row = ALL[item]
    assert row.keys() <= KEYS
    assert row.keys() & {"claims", "test", "kept", "why"}, "it has no outcome"
    for file, colon, name in (row["place"].partition(":"), row.get("test", "").partition("::")):
        text = (ROOT / file).read_text(encoding="utf-8") if file else ""
        assert not colon or name in names_in(text), name
    assert [
        each
        for each in row.get("claims", ())
        if not any(matches(claim, [each]) for claim in every_claim())
    ] == []


def test_every_claim_of_the_posts_has_a_row() -> None:
    own = [
        one
        for one in every_claim()
        if one.id.startswith(("2019/blog/", "huggingface/", "transformer-xl/post/"))
    ]
    patterns = [pattern for row in ALL.values() for pattern in row.get("claims", ())]
    assert [claim.id for claim in own if not matches(claim, patterns)] == []


def test_an_outcome_follows_the_verdicts_that_are_kept() -> None:
    rows = dict(
        line.split(" | ", 1) for part in seeds() for line in part.splitlines() if " | " in line
    )
    assert (
        "| `mlm-experiment ablate 2019/size --dataset DIR` | " in rows["| larger models end lower"]
    )
    assert rows["| T_o = 245,566 and T = 270,329"].endswith("| 3 confirmed |")
    assert len(rows) > 70
