"""Named protocols that score any checkpoint."""
