"""Contracts between processes, and what all packages share. Standard library only."""
