"""The tasks of the pipeline, pass by pass."""
