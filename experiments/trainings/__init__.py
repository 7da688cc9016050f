"""Trainings whose result is forecast: made side by side, kept small, with seeds that follow from a forecast."""
