"""Loads: which checkpoints there are, on disk and in memory; reading and verifying one."""
