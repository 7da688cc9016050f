"""Tokenizer, token files and the samples cut from them."""
