"""The engine's state in checkpoints: its pieces when it is saved, and how it is loaded."""
