"""Preflight checks of a job, and its start on a kind of cluster."""
