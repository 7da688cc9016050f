"""Computes log-probabilities of tokens, at any batch size and on any number of ranks, and stores
them."""
