"""Files that start a training run on many machines, made from one manifest."""
