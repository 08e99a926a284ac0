"""The engine's state in checkpoints: when it is saved, as which pieces, and how it comes back."""
