"""Published tables and figures: their numbers, the runs that reproduce them, and the machines that
those runs need."""
