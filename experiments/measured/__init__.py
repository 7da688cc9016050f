"""Measurements on this machine: functions that return lines of records
(`catalogue.MEASUREMENTS`)."""
