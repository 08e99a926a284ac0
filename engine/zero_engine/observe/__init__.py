"""What a run shows of itself: lines, curves, operations; how much memory a config needs."""
