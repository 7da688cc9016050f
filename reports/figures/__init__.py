"""Figures by subject: functions that return a Matplotlib figure."""
