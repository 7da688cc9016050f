"""Another program's model beside this engine's: its tensors in our names, how far rounding may take them, which differs
first."""
