"""Planners scored on what others measured. A planner is a module of `planners`, a data set one of `sets`."""
