"""Test sets, and the search for their text in a corpus."""
