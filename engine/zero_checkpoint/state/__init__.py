"""Translations between the state of a script or of torch and what a checkpoint holds."""
