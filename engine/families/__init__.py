"""Models beside GPT-2, one folder each. `engine.family` loads them."""
