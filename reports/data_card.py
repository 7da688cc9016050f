"""Texts of the data card: settings of the stages, and what the search for near-duplicates finds."""

from math import ceil
from typing import Any

from data_pipeline.files import DataCard, NearDuplicates
from reports.numbers import percent


def settings(card: DataCard) -> list[tuple[str, str]]:
    """Stages with their settings as text."""
    return [
        (stage, "; ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in setting.items()))
        for stage, setting in card.settings.items()
    ]


def near_duplicates(banding: NearDuplicates) -> list[str]:
    """Sentences on how likely a pair of documents is compared, and on the pairs that were."""
    bins = len(banding.compared_pairs_by_similarity)
    first = ceil(round(banding.threshold * bins, 6))
    above = sum(banding.compared_pairs_by_similarity[first:])
    least = "" if abs(banding.threshold * bins - first) < 1e-6 else "at least "
    agreeing = f" and at least {banding.min_agreement} equal minima" if banding.min_agreement else ""
    recalls = [
        f"{'over 0.9999' if 0.9999 < value < 1 else f'{value:.4f}'} at {similarity}"
        for similarity, value in banding.expected_recall.items()
    ]
    return [
        f"Near-duplicates are sought with {banding.bands} bands of {banding.rows} rows{agreeing} of "
        f"{banding.permutations} permutations over shingles of {banding.shingle_characters} characters.",
        f"The probability that a pair is compared, by its Jaccard similarity: {', '.join(recalls)}.",
        f"Of the {banding.compared_pairs:,} pairs that were compared {least}{above:,} "
        f"({percent(above, banding.compared_pairs)}) lie at or above the threshold of {banding.threshold:g}.",
    ]


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
