"""Each module has `NAME` and `guesses(cluster, known, asked)`: what it says of workloads after seeing measured ones."""
