"""Each module has `load()`: configurations that others measured."""
