"""What is asked of a model: the protocols, their test files, and how answers become numbers."""
