"""Universal checkpoints: one format, readable at any world size and ZeRO stage."""
