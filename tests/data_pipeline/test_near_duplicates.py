"""Near-duplicates against exact comparison of all pairs, and against the published scripts'
rules."""

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from mlm_repro.data_pipeline.config import DeduplicateConfig
from mlm_repro.data_pipeline.duplicates import near_duplicates
from mlm_repro.data_pipeline.duplicates.lsh import (
    agreement,
    buckets,
    fingerprints,
    required_agreement,
)
from mlm_repro.data_pipeline.duplicates.near_duplicates import Linked, link, resolve
from mlm_repro.data_pipeline.duplicates.near_duplicates import histogram as counted
from mlm_repro.data_pipeline.fast.shingles import shingles
from mlm_repro.data_pipeline.files import LEDGER, Ledger
from mlm_repro.data_pipeline.passes.deduplicate import DECISIONS, find_duplicates
from mlm_repro.data_pipeline.work.executors.local import LocalExecutor
from mlm_repro.data_pipeline.work.workspace import Workspace
from mlm_repro.lineage.files import read_document
from tests.commands import Command
from tests.data_pipeline.conftest import jaccard, sentences, write_jsonl
from tests.data_pipeline.shards import measured_shards
from tests.data_pipeline.test_lsh import components, edited, related_texts
from tests.made_data import invented_passages

DEFAULT = DeduplicateConfig()
PUBLISHED = DeduplicateConfig(rule="megatron-2019", bands=10, rows=10)

Fingerprints = np.ndarray


class Decision(NamedTuple):
    document: int
    survivor: int
    jaccard: float


def histogram(similarities: Sequence[float]) -> np.ndarray:
    return np.histogram(similarities, np.arange(21) / 20)[0]


def resolved(
    texts: Sequence[str],
    members: np.ndarray,
    starts: Sequence[int],
    config: DeduplicateConfig,
    held: int = 0,
) -> tuple[list[Decision], np.ndarray]:
    rows = fingerprints(texts, config)
    sketches = np.ascontiguousarray(rows[:, config.banding[0] :])
    linked = Linked(
        members,
        np.array(starts),
        lambda band: np.ascontiguousarray(rows[members, band]),
        sketches,
        texts.__getitem__,
    )
    found = resolve(linked, config, held)
    return sorted(Decision(*each) for each in found.decisions.tolist()), found.compared


def decide(
    texts: Sequence[str], config: DeduplicateConfig, held: int = 0
) -> tuple[list[Decision], np.ndarray]:
    """Decisions by components, in order of document, and how often which similarity was met."""
    rows = fingerprints(texts, config)
    first = components(rows[:, : config.banding[0]].T, rows[:, config.banding[0] :], config)
    members = np.argsort(first, kind="stable")
    starts = np.flatnonzero(np.diff(first[members], prepend=-1, append=-1))
    return resolved(texts, members, starts.tolist(), config, held)


def all_pairs(texts: Sequence[str]) -> np.ndarray:
    """Exact Jaccard similarity of every two texts, by the product of their incidence matrix with
    itself."""
    number: dict[str, int] = {}
    sets = [shingles(text) for text in texts]
    places = [number.setdefault(shingle, len(number)) for each in sets for shingle in each]
    sizes = np.array([len(each) for each in sets])
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    matrix = csr_matrix((np.ones(len(places), np.int32), places, bounds), (len(texts), len(number)))
    shared = (matrix @ matrix.T).toarray()
    return shared / (sizes[:, None] + sizes[None, :] - shared)


def planted(passages: Sequence[str], seed: int) -> list[str]:
    """Every passage, copies with up to a fifth of the words replaced, exact copies, and chains of
    growing edits."""
    rng = random.Random(seed)
    texts = list(passages)
    for passage in passages:
        texts += [edited(passage, rng.random() * 0.2, rng) for _ in range(3)]
        if rng.random() < 0.2:
            texts.append(passage)
        if rng.random() < 0.2:
            texts.append(edited(texts[-1], 0.07, rng))
            texts.append(edited(texts[-1], 0.07, rng))
    rng.shuffle(texts)
    return texts


def documentation_passages(count: int) -> list[str]:
    """Text of Python's reference, 150 words at a time."""
    words = " ".join(topics.values()).split()
    return [" ".join(words[at : at + 150]) for at in range(0, 150 * count, 150)]


@pytest.mark.parametrize("threshold", [0.2, 0.4, 0.7, 0.9])
def test_decisions_are_those_of_all_pairs(threshold: float) -> None:
    """Bands and rows follow from the threshold; a document of another dataset stays."""
    rng, config = random.Random(1), DeduplicateConfig(threshold=threshold)
    texts = planted([*invented_passages(60), *documentation_passages(20)], seed=3)
    texts += [edited(text, rng.random() * 0.5, rng) for text in texts]
    exact, kept, gone = all_pairs(texts), list[int](), list[tuple[int, int, float]]()
    for document, row in enumerate(exact):
        near = [earlier for earlier in kept if row[earlier] >= threshold]
        gone += [(document, near[0], row[near[0]])] if near else []
        kept += [] if near else [document]
    assert decide(texts, config)[0] == gone
    assert len(gone) > 60
    assert config.expected_recall >= 0.9999
    assert all(document >= 100 for document, *_ in decide(texts, config, 100)[0])


def pair_is_candidate(rows: Fingerprints, left: int, right: int, config: DeduplicateConfig) -> bool:
    return bool(
        (rows[left, : config.banding[0]] == rows[right, : config.banding[0]]).any()
        and agreement(rows[left, config.banding[0] :], rows[right, config.banding[0] :])
        >= required_agreement(config)
    )


def decide_plainly(
    texts: Sequence[str],
    config: DeduplicateConfig,
    most: int = 1000,
    offered: int = 1000,
    held: int = 0,
) -> tuple[list[Decision], np.ndarray]:
    """The rule `verified`, a sentence at a time."""
    return decide_and_count(texts, config, most, offered, held)[:2]


def decide_and_count(
    texts: Sequence[str], config: DeduplicateConfig, most: int, offered: int, held: int = 0
) -> tuple[list[Decision], np.ndarray, dict[int, int]]:
    """The rule `verified`, and for each document how many pairs were not compared, bucket by
    bucket."""
    rows = fingerprints(texts, config)
    kept: list[int] = []
    decisions, similarities, left = [], [], dict[int, int]()
    for document in range(len(texts)):
        own = rows[document, : config.banding[0]]
        sharing = [
            [each for each in kept if rows[each, band] == key] for band, key in enumerate(own)
        ]
        shared = [each for bucket in sharing for each in bucket[:offered]]
        near = [
            each for each in sorted({*shared}) if pair_is_candidate(rows, each, document, config)
        ]
        near = near if document >= held else []
        near.sort(
            key=lambda earlier: (
                -agreement(rows[earlier, config.banding[0] :], rows[document, config.banding[0] :])
            )
        )
        if over := sum(len(bucket[offered:]) for bucket in sharing) + len(near[most:]):
            left[document] = over
        for earlier in sorted(near[:most]):
            similarities.append(jaccard(shingles(texts[earlier]), shingles(texts[document])))
            if similarities[-1] >= config.threshold:
                decisions.append(Decision(document, earlier, similarities[-1]))
                break
        else:
            kept.append(document)
    return decisions, histogram(similarities), left


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    config=st.sampled_from(
        [DEFAULT, DeduplicateConfig(bands=3, rows=2, threshold=0.5, min_recall=0)]
    ),
)
def test_decisions_are_those_of_the_rule_and_need_only_the_component(
    seed: int, config: DeduplicateConfig
) -> None:
    texts = [*related_texts(seed, 24), "", "abc", "abc", ""]
    random.Random(seed).shuffle(texts)
    expected, similarities = decide_plainly(texts, config)
    by_component, compared = decide(texts, config)
    at_once, similar = resolved(texts, np.arange(len(texts)), [0, len(texts)], config)
    assert by_component == at_once == expected
    assert np.array_equal(compared, similarities)
    assert np.array_equal(similar, similarities)


@pytest.mark.parametrize("seed", range(3))
def test_the_most_similar_of_too_many_candidates_are_compared(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = related_texts(seed, 60)
    config = DeduplicateConfig(bands=25, rows=2, threshold=0.85)
    unlimited, all_compared = decide(texts, config)
    monkeypatch.setattr("mlm_repro.data_pipeline.duplicates.near_duplicates.MOST_COMPARED", 2)
    decisions, compared = decide(texts, config)
    expected, similarities = decide_plainly(texts, config, most=2)
    assert decisions == expected
    assert np.array_equal(compared, similarities)
    assert compared.sum() < all_compared.sum()
    assert len(decisions) > 0.9 * len(unlimited) > 5


def chain(links: int) -> list[str]:
    words = sentences(40, 1).split(" ")
    return [
        " ".join([f"new{n}" for n in range(10 * step)] + words[10 * step :])
        for step in range(links)
    ]


def test_a_chain_keeps_what_is_not_similar_to_a_survivor() -> None:
    texts = [sentences(40, 2), *chain(12), sentences(40, 3)]
    assert jaccard(shingles(texts[1]), shingles(texts[-2])) < 0.7
    decisions, _ = decide(texts, DEFAULT)
    kept = set(range(len(texts))) - {decision.document for decision in decisions}
    assert {0, 1, len(texts) - 1} < kept
    assert all(
        jaccard(shingles(texts[one]), shingles(texts[other])) < 0.7
        for one in kept
        for other in kept - {one}
    )


def test_the_published_rule_follows_a_chain() -> None:
    texts = [sentences(40, 2), *chain(12), sentences(40, 3)]
    decisions, _ = decide(texts, PUBLISHED)
    assert [(decision.document, decision.survivor) for decision in decisions] == [
        (n, 1) for n in range(2, 13)
    ]


def published_similarity(left: str, right: str) -> float:
    sets = [{text[head : head + 5] for head in range(len(text) - 5)} for text in (left, right)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1]) if all(sets) else 0.0


def groups_as_published(texts: Sequence[str], config: DeduplicateConfig) -> list[set[int]]:
    """Lines {main: others above 0.5} for every bucket of every band, then their groups, as the two
    scripts do it."""
    rows = fingerprints(texts, config)
    groups: list[set[int]] = []
    for band in range(config.banding[0]):
        for key in np.unique(rows[:, band]):
            main, *others = np.flatnonzero(rows[:, band] == key).tolist()
            listed = {other: published_similarity(texts[main], texts[other]) for other in others}
            line = {main} | {
                other
                for other, value in listed.items()
                if value > 0.5 and value >= config.threshold
            }
            touched = [group for group in groups if group & line]
            groups = [group for group in groups if not group & line] + [line.union(*touched)]
    return groups


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), threshold=st.sampled_from([0.7, 0.9, 0.3]))
def test_groups_are_the_published_scripts(seed: int, threshold: float) -> None:
    texts = [*related_texts(seed, 24), "", "abcde", "abcde", "abcdef", "abcdef"]
    random.Random(seed).shuffle(texts)
    config = PUBLISHED.model_copy(update={"rows": 4, "threshold": threshold})
    decisions, _ = decide(texts, config)
    expected = {
        document: min(group) for group in groups_as_published(texts, config) for document in group
    }
    assert {one.document: one.survivor for one in decisions} == {
        document: first for document, first in expected.items() if document != first
    }
    assert all(one.jaccard >= threshold for one in decisions)


@pytest.mark.parametrize("config", [DEFAULT, PUBLISHED], ids=lambda config: config.rule)
def test_a_bucket_of_equal_and_nearly_equal_documents_is_linear(config: DeduplicateConfig) -> None:
    base = sentences(30, 7)
    count = 3000
    texts = [base if number % 2 else f"{base} {number}" for number in range(count)]
    decisions, compared = decide(texts, config)
    assert len(decisions) == count - 1
    assert {decision.survivor for decision in decisions} == {0}
    assert compared.sum() < 3 * count
    assert compared[-2:].sum() == compared.sum()


def test_texts_are_not_read_without_candidates() -> None:
    rows = np.random.default_rng(0).integers(0, 2**64, (3, DEFAULT.banding[0]), np.uint64)

    def text_of(number: int) -> str:
        raise AssertionError(number)

    sketches = np.zeros((3, 32), np.uint64)
    bounds = np.array([0, 3])
    linked = Linked(np.arange(3), bounds, lambda band: rows[:, band].copy(), sketches, text_of)
    found = resolve(linked, DEFAULT)
    assert len(found.decisions) == 0


def test_similarities_are_counted_in_twentieths() -> None:
    values = np.array([0.0, 0.049, 0.7, 0.74, 0.75, 1.0, *np.arange(21) / 20])
    assert np.array_equal(counted(values), histogram(values.tolist()))


def pages_of_templates(count: int, templates: int = 3, seed: int = 0) -> list[str]:
    """Pages that are alike, and no two of them duplicates, but for one in fifty."""
    rng = random.Random(seed)
    words = [
        "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(3, 9)))
        for _ in range(3000)
    ]
    frames = [" ".join(rng.choices(words, k=80)) for _ in range(templates)]
    pages = [
        f"{frames[number % templates]} {' '.join(rng.choices(words, k=27))}"
        for number in range(count)
    ]
    for number in range(50, count, 50):
        pages[number] = pages[rng.randrange(number)].replace(" ", "  ", 1)
    return pages


def all_at_once(
    texts: Sequence[str], config: DeduplicateConfig
) -> tuple[list[Decision], np.ndarray, list[int], int]:
    """Decisions, histogram and what was not compared, of one component of all texts."""
    rows = fingerprints(texts, config)
    sketches, every = np.ascontiguousarray(rows[:, config.banding[0] :]), np.arange(len(texts))
    bounds = np.array([0, len(texts)])
    linked = Linked(every, bounds, lambda band: rows[:, band].copy(), sketches, texts.__getitem__)
    found = resolve(linked, config)
    return (
        [Decision(*each) for each in found.decisions.tolist()],
        found.compared,
        found.partly.tolist(),
        found.uncompared,
    )


def test_a_full_bucket_offers_its_first_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = pages_of_templates(150)
    everything, all_compared, partly, uncompared = all_at_once(texts, DEFAULT)
    assert (partly, uncompared) == ([], 0)
    monkeypatch.setattr("mlm_repro.data_pipeline.duplicates.near_duplicates.MOST_OFFERED", 5)
    decisions, compared, partly, _ = all_at_once(texts, DEFAULT)
    assert decisions == everything  # duplicates share rare buckets too
    assert compared.sum() < 0.8 * all_compared.sum()
    assert len(partly) > 100


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    offered=st.sampled_from([1, 2, 5, 1000]),
    most=st.sampled_from([1, 3, 1000]),
    config=st.sampled_from([DEFAULT, DeduplicateConfig(bands=25, rows=2, threshold=0.85)]),
)
def test_the_answer_is_that_of_all_pairs_or_it_is_said_what_was_not_compared(
    seed: int, offered: int, most: int, config: DeduplicateConfig
) -> None:
    texts = [*related_texts(seed, 30), *pages_of_templates(20, 2, seed)]
    random.Random(seed).shuffle(texts)
    unlimited, _ = decide_plainly(texts, config, len(texts), len(texts))
    expected, similarities, left = decide_and_count(texts, config, most, offered)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlm_repro.data_pipeline.duplicates.near_duplicates.MOST_OFFERED", offered)
        patch.setattr("mlm_repro.data_pipeline.duplicates.near_duplicates.MOST_COMPARED", most)
        decisions, compared, partly, uncompared = all_at_once(texts, config)
    assert decisions == expected
    assert np.array_equal(compared, similarities)
    assert (partly, uncompared) == ([*left], sum(left.values()))
    assert decisions == unlimited or uncompared > 0


def test_pages_of_templates_cost_what_their_number_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sketches and texts compared, and texts read, by the number of pages where buckets are
    full."""
    counted = [0, 0, 0]

    def agreeing(*given: Any) -> Any:
        counted[0] += 1
        return agreement(*given)

    for name, value in (("MOST_OFFERED", 4), ("MOST_COMPARED", 4), ("agreement", agreeing)):
        monkeypatch.setattr(near_duplicates, name, value)
    monkeypatch.setattr(near_duplicates, "_candidates", near_duplicates._candidates.py_func)
    texts, costs = pages_of_templates(1200), []

    def text_of(number: int) -> str:
        counted[2] += 1
        return texts[number]

    every = fingerprints(texts, DEFAULT)
    for count in (300, 600, 1200):
        counted[:], rows, partly = [0, 0, 0], every[:count], np.zeros(count, np.bool_)
        sketches, forest = np.ascontiguousarray(rows[:, DEFAULT.banding[0] :]), np.arange(count)
        for band in range(DEFAULT.banding[0]):
            link.py_func(
                forest,
                *buckets(rows[:, band].copy()),
                sketches,
                required_agreement(DEFAULT),
                partly,
                4,
            )
        bounds = np.array([0, count])
        keys = [rows[:, band].copy() for band in range(DEFAULT.banding[0])]
        linked = Linked(np.arange(count), bounds, keys.__getitem__, sketches, text_of)
        found = resolve(linked, DEFAULT)
        counted[1] = int(found.compared.sum())
        assert len(found.decisions) >= count // 60
        costs.append(counted.copy())
    for before, now in pairwise(costs):
        exponents = [math.log(b / a, 2) for a, b in zip(before, now, strict=True)]
        print(
            f"sketches, texts compared, texts read: {now}, exponents"
            f" {np.round(exponents, 2).tolist()}"
        )
        assert max(exponents) < 1.3


def documents_of(
    texts: Sequence[str], folder: Path, config: DeduplicateConfig, held: int = 0
) -> tuple[Any, ...]:
    """Decisions and compared pairs of the passes over shards of 7 documents each."""
    with LocalExecutor(1) as executor:
        workspace = Workspace(folder, executor)
        prepared, measured = measured_shards(workspace, texts, 7, config)
        decisions, compared = find_duplicates(workspace, prepared, measured, config, held)
        found = np.load(decisions.path / "00000" / DECISIONS)
    return [Decision(*each) for each in found.tolist()], compared.by_similarity


def test_a_run_says_what_it_did_not_compare(
    cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On standard error, in the ledger, and by `mlm-data stats`; and nothing where all was
    compared."""
    path = write_jsonl(tmp_path / "pages.jsonl", pages_of_templates(60, 1))
    for most, name in ((1000, "all"), (4, "some")):
        monkeypatch.setattr(
            "mlm_repro.data_pipeline.duplicates.near_duplicates.MOST_COMPARED", most
        )
        ran = cli("dedup", f"jsonl:{path}", name, "--workers=1")
        banding = read_document(tmp_path / name / LEDGER, Ledger).near_duplicates
        assert banding is not None
        assert (
            (banding.partly_compared_documents > 40)
            == (banding.uncompared_pairs > 100)
            == (most == 4)
        )
        said = [f"warning: {banding.left_out}"] if most == 4 else []
        for told in (ran.err, cli("stats", name).out):
            warnings = [line for line in told.splitlines() if line.startswith("warning: ")]
            assert [line for line in warnings if "were not compared" in line] == said


@pytest.mark.parametrize("held", [0, 20])
@pytest.mark.parametrize("seed", range(3))
def test_copies_are_decided_with_their_first(seed: int, held: int, tmp_path: Path) -> None:
    """Over shards, with copies of kept and of dropped texts: decisions and counts are those of the
    rule."""
    rng = random.Random(seed)
    texts = [*related_texts(seed, 40), "", "abc"]
    texts += [rng.choice(texts) for _ in range(60)]
    rng.shuffle(texts)
    decisions, compared = documents_of(texts, tmp_path, DEFAULT, held)
    expected, similarities = decide_plainly(texts, DEFAULT, held=held)
    assert decisions == expected
    assert np.array_equal(compared, similarities)
    assert any(
        each.jaccard < 1 and texts.index(texts[each.document]) < each.document for each in decisions
    )
    published, _ = documents_of(texts, tmp_path / "published", PUBLISHED)
    assert published == decide(texts, PUBLISHED)[0]


def test_bands_that_find_as_many_pairs_as_asked_are_taken() -> None:
    assert DeduplicateConfig(bands=28, rows=5, min_recall=0.992).expected_recall > 0.992
    with pytest.raises(ValueError, match="28 bands of 5 rows are expected to find 99"):
        DeduplicateConfig(bands=28, rows=5, min_recall=0.995)
