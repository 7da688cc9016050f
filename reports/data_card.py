"""Texts and tables of the data card: settings, dropped documents, near-duplicates."""

from math import ceil
from typing import Any

from data_pipeline.files import Amount, DataCard, Ledger, NearDuplicates, StageAttrition
from reports.exhibit import Table
from reports.numbers import MISSING, percent


def settings(card: DataCard) -> list[tuple[str, str]]:
    """Stages with their settings as text."""
    return [
        (stage, "; ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in setting.items()))
        for stage, setting in card.settings.items()
    ]


def dropped_most(ledger: Ledger) -> str:
    """Sentences on the stage that dropped most documents, its main reason and their share of the text."""
    lost = {stage.name: amount for stage in ledger.stages if (amount := _lost(stage))}
    if not lost:
        return "No stage dropped a document."
    stage = max((each for each in ledger.stages if each.name in lost), key=lambda each: lost[each.name].documents)
    mine, reason = lost[stage.name], max(stage.dropped, key=lambda name: stage.dropped[name].documents)
    sentence = (
        f"Most are dropped by the stage {stage.name}: {mine.documents:,} of the {stage.documents_in:,} that reach it "
        f"({percent(mine.documents, stage.documents_in)}), above all for this reason: {reason}."
    )
    if mine.tokens is None or not stage.tokens_in or not stage.tokens_out:
        return sentence
    return (
        f"{sentence} They have {_mean_tokens(mine.tokens, mine.documents)} tokens on average, those that stay "
        f"{_mean_tokens(stage.tokens_out, stage.documents_out)}: all together they are "
        f"{percent(mine.tokens, stage.tokens_in)} of the tokens. Samples stand below."
    )


def _lost(stage: StageAttrition) -> Amount | None:
    """Documents that a stage dropped for all reasons together."""
    amounts = stage.dropped.values()
    tokens = [amount.tokens for amount in amounts if amount.tokens is not None]
    if not (documents := sum(amount.documents for amount in amounts)):
        return None
    return Amount(documents=documents, tokens=sum(tokens) if len(tokens) == len(amounts) else None)


def _mean_tokens(tokens: int | None, documents: int) -> str:
    return MISSING if tokens is None or not documents else f"{tokens / documents:,.0f}"


def recalls(banding: NearDuplicates) -> list[str]:
    """Expected recall at each named similarity, never rounded up to 1."""
    return [
        f"{'over 0.9999' if 0.9999 < value < 1 else f'{value:.4f}'} at {similarity}"
        for similarity, value in banding.expected_recall.items()
    ]


def banding_caption(banding: NearDuplicates) -> list[str]:
    """Sentences on the two panels of the figure."""
    bins = len(banding.compared_pairs_by_similarity)
    first = ceil(round(banding.threshold * bins, 6))
    above = sum(banding.compared_pairs_by_similarity[first:])
    least = "" if abs(banding.threshold * bins - first) < 1e-6 else "at least "
    agreeing = f" and at least {banding.min_agreement} equal minima" if banding.min_agreement else ""
    return [
        f"Above: the probability that a pair of documents is compared, with {banding.bands} bands of "
        f"{banding.rows} rows{agreeing} of {banding.permutations} permutations over shingles of "
        f"{banding.shingle_characters} characters.",
        f"Below: the {banding.compared_pairs:,} pairs of this corpus that were compared, by their exact similarity; "
        f"{least}{above:,} ({percent(above, banding.compared_pairs)}) lie at or above the threshold of "
        f"{banding.threshold:g}.",
    ]


def banding_alt(banding: NearDuplicates) -> str:
    """Text alternative of the S-curve and the histogram."""
    return (
        f"Line chart of expected recall against Jaccard similarity: {'; '.join(recalls(banding))}. "
        f"Below, a histogram of {banding.compared_pairs:,} compared pairs by similarity, with the threshold at "
        f"{banding.threshold:g}."
    )


def banding_data(banding: NearDuplicates) -> Table:
    """Points of the curve, then bins of the histogram by lower edge."""
    bins = banding.compared_pairs_by_similarity
    rows = [("expected recall", str(similarity), str(value)) for similarity, value in banding.s_curve]
    rows += [("compared pairs", str(index / len(bins)), str(count)) for index, count in enumerate(bins)]
    return Table(("series", "jaccard", "value"), rows)


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
