"""Saves: staging, writing, the commit, and the housekeeping after it."""
