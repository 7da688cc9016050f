"""Turns text into clean, deduplicated, decontaminated token files.

Each part imports only those above it:

arrays.py       names for types of arrays
document.py     a document, or the reason it was dropped
files.py        schemas of ledger.json and dataset.json, and the datasets that a run names
fast/           fast code that replaces a library's, checked against the library at first use
tokens/         tokenizer, token files, samples cut from them
work/           tasks, the executors that run them, the files they leave
reading/        sources and the documents in them
contamination/  test sets, and the search for their text in a corpus
stages/         a file for each stage: settings, verb, rank in the order and a filter's work
verbs.py        the stages' verbs, read from these files
duplicates/     near-duplicates: buckets, components, decisions
config.py       the recipe of a dataset
passes/         the tasks of a build
remade.py       checks that recompute the files of a dataset
pipeline.py     the stages in order, as tasks
publish.py      the files of a finished dataset
page.py         a page on a dataset, and a README for the hub
imported.py     token files of other programs as a dataset
runner.py       from a recipe to a finished directory
cli.py          `mlm-data`
"""
