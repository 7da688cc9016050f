"""Models that are scored: where their files lie, and how those of other programs are loaded."""
