"""Idempotent tasks, where they run and what they leave on disk."""
