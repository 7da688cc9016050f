"""Megatron-LM's experiments, reproduced: `mlm_repro`, the import package that holds all folders.

`setup.py` maps this file to `mlm_repro/__init__.py` and each folder to a package in it. Because the
package has this file, Python does not mix it with a folder of the same name, such as a clone, on a
user's path.
"""
