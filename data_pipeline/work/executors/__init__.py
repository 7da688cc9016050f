"""Executors of tasks: processes of this machine, a Ray cluster, or the parts of an array of
jobs."""
