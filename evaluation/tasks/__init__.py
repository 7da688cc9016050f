"""The protocols: their test files, their requests to a model, and the numbers that its answers
become."""
