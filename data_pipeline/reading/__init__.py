"""Where documents come from: sources, pieces of files, lines."""
