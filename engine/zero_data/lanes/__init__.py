"""Lanes: any data at any world size."""
