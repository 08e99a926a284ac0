"""Optimizers, schedulers and loss scalers: which are supported, and how and when they step."""
