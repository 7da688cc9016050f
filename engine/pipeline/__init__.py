"""Pipeline parallelism: order as a value, its messages, and what runs it."""
