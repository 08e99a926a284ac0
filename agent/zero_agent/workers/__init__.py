"""The workers of a node: how they start, the messages they send, how they end."""
