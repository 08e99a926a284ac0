"""One parameter at any stage: its weights, gradient and state, whole or a share."""
