"""Pipeline parallelism: schedules as values, their messages, and their execution."""
