"""Checkpoints in the memory of nodes."""
