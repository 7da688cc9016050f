"""A small reproduction is killed, stopped or starved at its writes, started again and compared.

`python -m tests.chaos --all --out results/chaos` tries every kind of fault at every kind of point.
"""
