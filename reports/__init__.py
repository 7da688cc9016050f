"""Makes a page, its figures and its tables from result files alone."""
