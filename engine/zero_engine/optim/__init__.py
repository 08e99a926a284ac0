"""Optimizers, and how they step on shards; loss scale and learning-rate schedules."""
