"""The engine itself: `initialize`, the steps, and what a script calls."""
