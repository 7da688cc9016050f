"""Accuracy, and SQuAD's exact match and F1 by the rules of its own evaluation scripts. Imports no torch."""

import re
import string
from collections import Counter
from collections.abc import Sequence


def accuracy(predicted: Sequence[int], expected: Sequence[int]) -> float:
    """Share of answers that are right, in percent."""
    return 100 * sum(answer == other for answer, other in zip(predicted, expected, strict=True)) / len(expected)


def squad_scores(predicted: Sequence[str], expected: Sequence[Sequence[str]]) -> dict[str, float]:
    """Exact match and F1 over questions, in percent: of each the best over its answers.

    A question without an answer is right when the empty answer is given (SQuAD 2.0, `evaluate-v2.0.py`; for answered
    questions `evaluate-v1.1.py` has the same rules).
    """
    exact = [max(float(normalize(text) == normalize(answer)) for answer in _known(answers)) for text, answers in
             zip(predicted, expected, strict=True)]  # fmt: skip
    overlap = [max(token_f1(text, answer) for answer in _known(answers)) for text, answers in
               zip(predicted, expected, strict=True)]  # fmt: skip
    return {"exact_match": 100 * sum(exact) / len(exact), "f1": 100 * sum(overlap) / len(overlap)}


def normalize(text: str) -> str:
    """Lower case without punctuation, articles and superfluous white space."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(predicted: str, expected: str) -> float:
    """Harmonic mean of precision and recall of the words of an answer."""
    mine, theirs = normalize(predicted).split(), normalize(expected).split()
    if not mine or not theirs:
        return float(mine == theirs)
    common = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * common / (len(mine) + len(theirs))


def _known(answers: Sequence[str]) -> Sequence[str]:
    """Answers that are not empty once normalised; the empty one if there is none."""
    return [answer for answer in answers if normalize(answer)] or [""]
