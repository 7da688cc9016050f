"""Run a function on forked gloo ranks; a failure of any is the test's."""

from engine.launch.forked import run_forked as run_ranks

__all__ = ["run_ranks"]
