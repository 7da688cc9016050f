"""One page, its figures and its tables, made from a reproduction directory's files alone."""
