"""Access to single parameters at any stage: weights, gradient and optimizer state."""
