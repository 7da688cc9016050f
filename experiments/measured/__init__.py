"""What experiments measure on this machine: by the names of `Experiment.measures`, by training arms, at proxy sizes."""
