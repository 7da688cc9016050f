"""What experiments measure on this machine without training, by the names of `Experiment.measures`."""
