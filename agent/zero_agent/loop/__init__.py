"""One agent at work: what happens on its loop, and what it decides there."""
