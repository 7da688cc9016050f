"""Log-probabilities of tokens, at any batch and on any number of ranks, and the store that keeps
them."""
