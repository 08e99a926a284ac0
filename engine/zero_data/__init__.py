"""Which rank runs which samples in which step, and the proof that each was run once."""
