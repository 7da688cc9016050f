"""Megatron-LM's experiments, reproduced: the one import package, `mlm_repro`, of all folders.

`setup.py` maps this file to `mlm_repro/__init__.py` and each folder to a package in it. A package
that has this file is not mixed with a folder of the same name, such as a clone, that a user's path
holds.
"""
