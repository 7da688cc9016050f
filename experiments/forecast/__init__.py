"""Forecasts that are sealed before the trainings that they are about: ladders of sizes, ablations,
published curves."""
