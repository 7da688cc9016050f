"""Idempotent tasks, the executors that run them, and the files they leave."""
