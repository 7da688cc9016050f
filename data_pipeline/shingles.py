"""Character shingles and the exact Jaccard similarity of two texts."""


def shingles(text: str, characters: int = 5) -> frozenset[str]:
    """Every run of `characters` characters; a shorter text is its own only shingle."""
    return frozenset(text[start : start + characters] for start in range(max(1, len(text) - characters + 1)))


def jaccard(left: frozenset[str], right: frozenset[str]) -> float:
    """Shared shingles over all shingles, 0 to 1."""
    shared = len(left & right)
    union = len(left) + len(right) - shared
    return shared / union if union else 1.0
