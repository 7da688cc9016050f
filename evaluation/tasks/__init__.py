"""The protocols: their test files, their requests to a model, and how its answers become
numbers."""
