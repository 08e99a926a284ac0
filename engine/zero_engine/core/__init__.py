"""The engine itself: how it is made, what a step is, what a script calls."""
