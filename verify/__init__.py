"""Check a finished run, the engine's layouts against its serial run, and the engine against other
programs."""
