"""From text to clean, deduplicated, decontaminated token files. Each part imports only those above it:

document.py     what flows through the pipeline
fast/           fast code that takes the place of a library's, held against the library at first use
append.py       one file written at the end of another
tokens/         tokenizer, token files, samples cut from them
work/           tasks, where they run, what they leave on disk
reading/        sources and the documents in them
contamination/  test sets, and what of their text a corpus holds
stages/         one file for each stage: its settings, its verb, its place in the order and, of a filter, its work
english.py      what kind of English a dataset is
duplicates/     near-duplicates: buckets, components, decisions
ledger.py       what each stage received, kept, changed and dropped
config.py       the recipe of a dataset
passes/         the tasks of a build
pipeline.py     their order
publish.py      the files of a finished dataset
runner.py       from a recipe to a finished directory
cli.py          `mlm-data`
"""

import lineage  # noqa: F401  (refuses a Python that is too old, before anything else fails on it)
