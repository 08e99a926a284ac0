"""Tuning for training on CPUs, not needed on GPUs: same-host reads, settings of malloc."""
