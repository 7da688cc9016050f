"""One module for each figure; each has a function `draw` that returns a Matplotlib figure."""
