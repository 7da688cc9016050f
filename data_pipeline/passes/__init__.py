"""The tasks of a build, pass by pass."""
