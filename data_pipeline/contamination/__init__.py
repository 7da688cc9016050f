"""Test sets, and what of their text a corpus holds."""
