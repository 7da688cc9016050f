"""The benchmarks: each module is a verb of `mlm-bench`, its `measure` the command whose answer is the record."""
