"""Models beside GPT-2, one folder each. `mlm_repro.engine.family` loads them."""
