"""The workers of a node: how they start, what they say, how they end."""
