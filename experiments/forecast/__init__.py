"""Forecasts of ablations that are sealed before the trainings that they are about."""
