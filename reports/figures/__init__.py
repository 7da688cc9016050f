"""Figures by subject: functions that draw for a wide page, or for a narrow one, and return a Matplotlib figure."""
